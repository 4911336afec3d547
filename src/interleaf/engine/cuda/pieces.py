"""Captured steps that mix prompt chunks with decode rows: a graph for everything between two attentions.

What attention launches depends on the lengths of the chunks, and is launched step by step; the rest depends on the
number of rows only. A layer is then one replay, one rotary, one or two attentions and a copy for the host, whatever the
adapters need; launched one by one it would be ten launches, and eight to twenty more with adapters, which for a few
hundred rows takes the host longer than the GPU.

    piece 0      tokens, positions ─▶ rotations, h, q k v of layer 0
    piece i      o of layer i - 1  ─▶ the rest of that layer, q k v of layer i
    last piece   o of the last     ─▶ the rest of it; final norm, head and sampling follow outside, for the sampled rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from interleaf.attention import StepAttention
from interleaf.engine.cuda.device import Device
from interleaf.kernels import LoraWork
from interleaf.kernels.rotary import RopeAngles
from interleaf.model.transformer import Transformer

ROWS_STEP = 64
"""Rows by which capacities grow: a product takes as long for all numbers of rows in between."""
SMALL_STEP_ROWS = 1024
"""Of a step that is worth running in pieces: above, the GPU takes longer than the host."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What enqueues the pieces of one step, in their order: replays of graphs, or the launches themselves."""

    pieces: Sequence[Callable[[], object]]


class PiecewiseForward:
    """Forward passes in pieces, and the buffers that lead from one to the next; one pass at a time.

    Args:
        max_rows: of a step in pieces.
    """

    def __init__(self, device: Device, model: Transformer, pool: torch.Tensor, max_rows: int) -> None:
        self.max_rows = max_rows
        self._device = device
        self._model = model
        self._pool = pool
        where, dtype = device.torch_device, model.dtype
        shard, head_dim = model.shard, model.spec.head_dim
        heads = shard.heads.count

        def rows(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(max_rows, *shape, dtype=of, device=where)

        self._tokens, self._positions = rows(of=torch.int64), rows(of=torch.int64)
        self._cos, self._sin = rows(1, head_dim), rows(1, head_dim // 2)
        self._qkv = rows(heads + 2 * shard.kv_heads.count, head_dim)
        self._o = rows(heads * head_dim)
        self._h, self._y = rows(model.spec.hidden_size), rows(model.spec.hidden_size)

    def capacity(self, num_rows: int) -> int:
        """Rows of the pieces that take so many."""
        return min(-(-num_rows // ROWS_STEP) * ROWS_STEP, self.max_rows)

    def capture(self, capacity: int, lora: LoraWork | None) -> Pieces:
        """Capture the pieces of a step. Everything they launch must have been compiled."""
        return Pieces([self._device.capture(run)[0].replay for run in self._runs(capacity, lora)])

    def uncaptured(self, capacity: int, lora: LoraWork | None) -> Pieces:
        """The pieces, launched kernel by kernel: the same shapes, so that a row's bits do not tell which it was."""
        return Pieces(self._runs(capacity, lora))

    def _runs(self, capacity: int, lora: LoraWork | None) -> list[Callable[[], torch.Tensor]]:
        runs: list[Callable[[], torch.Tensor]] = [lambda: self._begin(capacity, lora)]
        runs += [lambda i=i: self._after(i, capacity, lora) for i in range(self._model.spec.num_layers)]  # type: ignore[misc]
        return runs

    def run(
        self,
        pieces: Pieces,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        sampled: torch.Tensor | None,
    ) -> torch.Tensor:
        """Enqueue a step of up to the pieces' rows; those left over compute what nobody reads.

        Args: token_ids, positions: [T] int64.   sampled: [S] int64 rows; None: all.
        Returns: logits of the sampled rows.
        """
        n = len(token_ids)
        self._tokens[:n].copy_(token_ids)
        self._positions[:n].copy_(positions)
        angles, qkv, o = RopeAngles(self._cos[:n], self._sin[:n]), self._qkv[:n], self._o[:n]
        first, *others = pieces.pieces
        first()
        for layer, piece in enumerate(others):
            o.copy_(attention.forward(layer, qkv, angles))
            piece()
        return self._model.logits(self._y[:n], self._h[:n], sampled)

    def _begin(self, rows: int, lora: LoraWork | None) -> torch.Tensor:
        angles = self._model.angles(self._positions[:rows])
        self._cos[:rows].copy_(angles.cos)
        self._sin[:rows].copy_(angles.sin)
        h = self._h[:rows]
        h.copy_(self._model.embed(self._tokens[:rows]))
        return self._qkv[:rows].copy_(self._model.first_qkv(h, self._pool, lora))

    def _after(self, layer: int, rows: int, lora: LoraWork | None) -> torch.Tensor:
        found = self._model.after_attention(layer, self._o[:rows], self._h[:rows], self._pool, lora)
        return (self._qkv if layer + 1 < self._model.spec.num_layers else self._y)[:rows].copy_(found)
