"""Attention on a GPU by our own kernels, in every dtype: what runs float32, and 16 bits where FlashInfer is missing.

Each step the host cuts its rows into programs and sends their records in one copy; all layers share them. For a graph
the records lie at fixed places and the grids are as large as they can become: programs without work end at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interleaf.attention.device import DeviceRows
from interleaf.attention.paged_plan import RECORD_INTS, Int32s, cut_chunks, cut_decode
from interleaf.kernels.kv import rotate_and_append
from interleaf.kernels.rotary import RopeAngles
from interleaf.kernels.uploads import Uploads
from interleaf.memory.pool import PagePool

_PROGRAMS_PER_SM = 4
"""Decode programs that keep an SM's share of the memory busy; five fit (Llama-3-8B heads, 16 bits)."""

_INTERPRETED_SMS = 8
"""Of the GPU that Triton's interpreter plays: few, so that long sequences are cut in tests too."""
_BLOCK_BYTES = 16384
"""Of K, and of V, that a decode program loads at a time."""


class TritonPaged:
    """The backend of `interleaf.kernels.paged_attention`; see DeviceAttention.

    Everything it needs on the device is allocated here. `prepare` and `prepare_graph` copy on the current stream, which
    must be the one that computes: the records of a step take the place of those of the step before.

    Args:
        num_heads: query heads; a multiple of the pool's KV heads.
        window: tokens a query may look back at, itself included; None = all.
        scale: what scores are multiplied by; None: 1 / sqrt(head_dim).
        max_seqs: sequences of a step at most, padding of a graph's batch included.
        max_rows: rows of a step with chunks at most.

    Attributes:
        shapes: of the kernels.

    Raises: ValueError: the pool's heads do not suit.
    """

    def __init__(
        self,
        pool: PagePool,
        num_heads: int,
        *,
        window: int | None = None,
        scale: float | None = None,
        max_seqs: int,
        max_rows: int,
    ) -> None:
        data, g = pool.data, pool.geometry
        if num_heads % g.num_kv_heads or g.head_dim % 2:
            raise ValueError(
                f"num_heads must be a multiple of {g.num_kv_heads} KV heads and head_dim even, got {num_heads} and "
                f"{g.head_dim}"
            )
        self._pool = data
        self._window = window
        self._max_seqs, self._max_rows = max_seqs, max_rows
        on_gpu = data.is_cuda
        sms = torch.cuda.get_device_properties(data.device).multi_processor_count if on_gpu else _INTERPRETED_SMS
        self._spare_parts = -(-sms * _PROGRAMS_PER_SM // g.num_kv_heads)
        self.shapes = KernelShapes(data, num_heads, 1.0 / math.sqrt(g.head_dim) if scale is None else scale, window)
        num_records = 2 * self._spare_parts + max_seqs + max_rows // self.shapes.tile_rows
        # Zeroes are records of programs that end at once.
        self._records = torch.zeros(num_records, RECORD_INTS, dtype=torch.int32, device=data.device)
        self._uploads = Uploads(data.device)
        part_shape = (2 * self._spare_parts, num_heads)
        self._part_out = torch.empty(*part_shape, g.head_dim, dtype=torch.float32, device=data.device)
        self._part_lse = torch.empty(part_shape, dtype=torch.float32, device=data.device)

    def prepare(self, rows: DeviceRows) -> PagedStep:
        """See DeviceAttention."""
        num_rows = len(rows.slots)
        if num_rows > self._max_rows:
            raise ValueError(f"a step may have {self._max_rows} rows, got {num_rows}")
        parts, merges = self._cut_decode(rows)
        chunk = slice(rows.num_decode, None)
        q_lens = rows.host_q_lens[chunk]
        first_row = rows.num_decode + np.cumsum(q_lens, dtype=np.int32) - q_lens
        tiles = cut_chunks(rows.host_seats[chunk], first_row, q_lens, rows.host_kv_lens[chunk], self.shapes.tile_rows)
        return self._step(rows, merges, parts, tiles)

    def prepare_graph(self, rows: DeviceRows) -> PagedStep:
        """See DeviceAttention. Where host arrays are shorter than the tensors, the rows that they lack see nothing."""
        parts, merges = self._cut_decode(rows)
        padded = np.zeros((len(rows.seats) + self._spare_parts, RECORD_INTS), dtype=np.int32)
        padded[: len(parts)] = parts
        all_merges = np.zeros((self._spare_parts, RECORD_INTS), dtype=np.int32)
        all_merges[: len(merges)] = merges
        return self._step(rows, all_merges, padded, padded[:0])

    def _cut_decode(self, rows: DeviceRows) -> tuple[Int32s, Int32s]:
        num_seqs = len(rows.seats)
        if num_seqs > self._max_seqs:
            raise ValueError(f"a step may have {self._max_seqs} sequences, got {num_seqs}")
        stop = rows.host_kv_lens[: rows.num_decode]
        first = np.zeros_like(stop) if self._window is None else np.maximum(stop - self._window, 0)
        seats = rows.host_seats[: rows.num_decode]
        return cut_decode(seats, first, stop, self._spare_parts, self.shapes.part_step)

    def _step(self, rows: DeviceRows, merges: Int32s, parts: Int32s, tiles: Int32s) -> PagedStep:
        sizes = [len(merges), len(parts), len(tiles)]
        records = self._records[: sum(sizes)]
        self._uploads.send(np.concatenate([merges, parts, tiles]), records)
        of_merges, of_parts, of_tiles = torch.split(records, sizes)
        return PagedStep(self.shapes, rows, of_merges, of_parts, of_tiles, self._pool, self._part_out, self._part_lse)


class KernelShapes:
    """What is fixed for all launches.

    Attributes:
        decode, merge, chunks: compile-time arguments and launch options of each kernel.
        log2_scale: what scores are multiplied by, in powers of two.
        tile_rows: rows of the batch in a tile of a chunk.
        part_step: positions that a decode program takes at a time.
    """

    def __init__(self, pool: Tensor, num_heads: int, scale: float, window: int | None) -> None:
        page_tokens, kv_heads, head_dim = pool.shape[3:]
        group = num_heads // kv_heads
        block_dim, block_group = max(16, _power_of_2(head_dim)), max(16, _power_of_2(group))
        is_wide = pool.dtype == torch.float32
        launch = {"PDL": pool.is_cuda} | ({"launch_pdl": True} if pool.is_cuda else {})
        heads = {"GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_DIM": block_dim}
        pages = {"PAGE_TOKENS": page_tokens, "PAGE_ELEMS": pool.stride(0)}
        self.log2_scale = scale * math.log2(math.e)
        # Products of float32 take no tensor core: larger blocks would not fit the registers.
        per_token = block_dim * pool.dtype.itemsize * (2 if is_wide else 1)
        self.part_step = min(64, max(16, _BLOCK_BYTES // per_token))
        self.decode: dict[str, Any] = {
            **launch, **heads, **pages, "BLOCK_GROUP": block_group, "BLOCK_TOKENS": self.part_step, "STAGES": 3,
            "num_warps": 4,
        }  # fmt: skip
        small_group = _power_of_2(group)
        self.merge: dict[str, Any] = {
            **launch, **heads, "BLOCK_GROUP": small_group, "BLOCK_PARTS": max(1, 4096 // (small_group * block_dim)),
            "num_warps": 4,
        }  # fmt: skip
        block_rows = max(32 if is_wide else 128, block_group)
        self.tile_rows = block_rows // group
        self.chunks: dict[str, Any] = {
            **launch, **heads, **pages, "BLOCK_ROWS": block_rows, "WINDOW": window or 0,
            "BLOCK_TOKENS": (16 if is_wide else 32) if block_dim > 128 else (32 if is_wide else 64), "STAGES": 3,
            "num_warps": 8,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention of one step. The records are views of the backend's: they hold until the next step is prepared.

    Attributes:
        merges, parts, tiles: [N, 8]; none: nothing is launched for them.
    """

    shapes: KernelShapes
    rows: DeviceRows
    merges: Tensor
    parts: Tensor
    tiles: Tensor
    pool: Tensor
    part_out: Tensor
    part_lse: Tensor

    def forward(self, layer: int, qkv: Tensor, angles: RopeAngles) -> Tensor:
        """See StepAttention."""
        from interleaf.kernels import paged_attention

        rows, shapes = self.rows, self.shapes
        q = rotate_and_append(qkv, angles, rows.slots, self.pool, layer)
        out = torch.empty_like(q)
        kv_heads = self.pool.shape[4]
        sequences = (rows.table, rows.table.stride(0), self.pool, layer, out)
        if len(self.parts):
            paged_attention.decode[(kv_heads, len(self.parts))](
                self.parts, q, *sequences, self.part_out, self.part_lse, shapes.log2_scale, **shapes.decode
            )
        if len(self.merges):
            paged_attention.merge[(kv_heads, len(self.merges))](
                self.merges, self.part_out, self.part_lse, out, **shapes.merge
            )
        if len(self.tiles):
            paged_attention.chunks[(kv_heads, len(self.tiles))](
                self.tiles, q, *sequences, shapes.log2_scale, **shapes.chunks
            )
        return out.flatten(1)


def _power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()
