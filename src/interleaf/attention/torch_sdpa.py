"""Attention on the CPU: pages are gathered, torch's scaled_dot_product_attention does the rest.

Decode rows of similar length share one SDPA per layer; prompt rows one per run of chunks with the same bounds. What was
measured, and what was slower, is in docs/benchmarks/cpu-engine.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from interleaf.attention.base import AttentionRows, ChunkRows
from interleaf.kernels.rotary import RopeAngles, rotate
from interleaf.memory.page_table import Ints, PageTable
from interleaf.memory.pool import LayerRows, PagePool

_SHORT_TOKENS = 128
"""Contexts up to this length are gathered together: padding them costs less than another SDPA."""


class TorchSdpa:
    """The backend for CPUs, in every dtype.

    Args:
        window: tokens a query may look back at, itself included; None = all.
    """

    def __init__(self, pool: PagePool, window: int | None = None) -> None:
        self._window = window
        self._blocks = pool.kv_blocks()
        self._slots = pool.kv_slots()
        self._dtype = pool.data.dtype
        self._page_tokens = pool.geometry.page_tokens
        self._kv_heads = pool.geometry.num_kv_heads

    def prepare(self, rows: AttentionRows) -> SdpaStep:
        """Index arrays and masks of one step."""
        table, seats = rows.table, rows.decode
        row_seats, positions = [seats], [table.lengths[seats]]
        parts: list[_Decode | _Prefill] = []
        for at in _buckets(table.lengths[seats] + 1):
            parts.append(self._decode(table, seats[at], None if len(at) == len(seats) else at))
        first_row = len(seats)
        for (first, count), run in groupby(rows.chunks, key=lambda c: (c.first, c.count)):
            chunks = list(run)
            parts.append(self._prefill(table, chunks, first_row, first, count))
            first_row += len(chunks) * count
            for chunk in chunks:
                row_seats.append(np.full(count, chunk.seat))
                positions.append(np.arange(first, first + count))
        written = table.slots(np.concatenate(row_seats), np.concatenate(positions), self._slots.rows_per_page)
        return SdpaStep(self._blocks, self._slots, self._kv_heads, torch.from_numpy(written), tuple(parts))

    def _gathered(self, table: PageTable, seats: Ints, start: Ints, stop: Ints) -> tuple[torch.Tensor, Ints, Ints]:
        """Blocks that hold positions [start, stop) of each seat, and what lies in their slots.

        Where a sequence has fewer than m pages its own first one is repeated: another sequence's page could hold NaN,
        which no mask takes away.

        Returns: blocks [2 * N * m], rows of the pool for all K and then all V; positions [N, m * page_tokens], those
            that the slots stand for; unwritten [U], slots of K that their sequence has not reached: in its last page.
        """
        page_tokens = self._page_tokens
        first_page = start // page_tokens
        num_pages = -(-stop // page_tokens) - first_page
        column = first_page[:, None] + np.arange(num_pages.max())
        own = np.where(column < (first_page + num_pages)[:, None], column, first_page[:, None])
        slot = np.arange(page_tokens)
        positions = (column[:, :, None] * page_tokens + slot).reshape(len(seats), -1)
        unwritten = own[:, :, None] * page_tokens + slot >= stop[:, None, None]
        keys = table.pages[seats[:, None], own].reshape(-1) * self._blocks.rows_per_page
        blocks = torch.from_numpy(np.concatenate([keys, keys + self._blocks.key_to_value]))
        return blocks, positions, np.flatnonzero(unwritten)

    def _decode(self, table: PageTable, seats: Ints, at: Ints | None) -> _Decode:
        stop = table.lengths[seats] + 1
        start = np.zeros_like(stop) if self._window is None else np.maximum(stop - self._window, 0)
        blocks, positions, unwritten = self._gathered(table, seats, start, stop)
        hidden = (positions >= stop[:, None]) | (positions < start[:, None])
        # Slots at the end that no row sees are cut off; what is left is masked.
        length = int(np.flatnonzero(~hidden.all(axis=0))[-1]) + 1
        return _Decode(
            rows=None if at is None else torch.from_numpy(at),
            num_rows=len(seats),
            blocks=blocks,
            length=length,
            unwritten=torch.from_numpy(np.concatenate([unwritten, unwritten + positions.size])),
            mask=self._mask(hidden[:, None, None, :length]),
        )

    def _prefill(self, table: PageTable, chunks: list[ChunkRows], first_row: int, first: int, count: int) -> _Prefill:
        stop = first + count
        start = 0 if self._window is None else max(first + 1 - self._window, 0)
        seats = np.array([c.seat for c in chunks], dtype=np.int64)
        n = len(chunks)
        blocks, positions, _ = self._gathered(table, seats, np.full(n, start), np.full(n, stop))
        seen = positions[0, : stop - positions[0, 0]]  # the rest of the last page is not looked at
        query = np.arange(first, stop)[:, None]
        hidden = seen > query
        if self._window is not None:
            hidden |= seen <= query - self._window
        is_causal = first == 0 and (self._window is None or count <= self._window)
        return _Prefill(
            first_row=first_row,
            num_chunks=n,
            count=count,
            blocks=blocks,
            length=len(seen),
            is_causal=is_causal,
            mask=None if is_causal else self._mask(hidden),
        )

    def _mask(self, hidden: np.ndarray) -> torch.Tensor | None:
        """What is added to scores; None if nothing is hidden."""
        if not hidden.any():
            return None
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)


@dataclass(frozen=True, slots=True)
class SdpaStep:
    """Attention of one step. `written` are the pool's rows that the step's tokens go to, [T]."""

    blocks: LayerRows
    slots: LayerRows
    kv_heads: int
    written: torch.Tensor
    parts: tuple[_Decode | _Prefill, ...]

    def forward(self, layer: int, qkv: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
        """See StepAttention. Rows are written before they are read: a chunk attends to itself through the pool."""
        kv_heads = self.kv_heads
        qk = rotate(qkv[:, :-kv_heads], angles)
        q = qk[:, :-kv_heads]
        self.slots.k[layer].index_copy_(0, self.written, qk[:, -kv_heads:].flatten(1))
        self.slots.v[layer].index_copy_(0, self.written, qkv[:, -kv_heads:].flatten(1))
        tokens, heads, head_dim = q.shape
        out = q.new_empty(tokens, heads * head_dim)
        for part in self.parts:
            part.attend(q, self.blocks.k[layer], kv_heads, out)
        return out


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one query each. The query heads that share a KV head are folded into the query's length.

    Attributes:
        rows: [N] rows of the batch; None: the first N.
        blocks: [2 * N * pages].
        length: slots of a sequence that are looked at.
        unwritten: gathered slots that hold whatever was there before; under a mask, NaN would still give NaN.
        mask: [N, 1, 1, length].
    """

    rows: torch.Tensor | None
    num_rows: int
    blocks: torch.Tensor
    length: int
    unwritten: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, q: torch.Tensor, pool: torch.Tensor, kv_heads: int, out: torch.Tensor) -> None:
        own = q[: self.num_rows] if self.rows is None else q.index_select(0, self.rows)
        slots = pool.index_select(0, self.blocks).view(-1, kv_heads * q.shape[2])
        if self.unwritten.numel():
            slots.index_fill_(0, self.unwritten, 0)
        keys, values = _halves(slots, self.num_rows, kv_heads, q.shape[2], self.length)
        folded = own.view(self.num_rows, kv_heads, -1, q.shape[2])
        found = scaled_dot_product_attention(folded, keys, values, self.mask)
        if self.rows is None:
            out[: self.num_rows].view_as(found).copy_(found)
        else:
            out.index_copy_(0, self.rows, found.reshape(self.num_rows, -1))


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Chunks with the same bounds, in neighbouring rows.

    Attributes:
        blocks: [2 * chunks * pages].
        length: slots of a sequence that are looked at; all of them have been written.
        is_causal: the chunk begins its sequence, and each row sees the rows before it and itself; there is no mask.
        mask: [count, length]; None: nothing else is hidden. (A single row behind others sees all of them: torch's
            `is_causal` would show it the first only.)
    """

    first_row: int
    num_chunks: int
    count: int
    blocks: torch.Tensor
    length: int
    is_causal: bool
    mask: torch.Tensor | None

    def attend(self, q: torch.Tensor, pool: torch.Tensor, kv_heads: int, out: torch.Tensor) -> None:
        rows = slice(self.first_row, self.first_row + self.num_chunks * self.count)
        own = q[rows].view(self.num_chunks, self.count, *q.shape[1:]).transpose(1, 2)
        keys, values = _halves(pool.index_select(0, self.blocks), self.num_chunks, kv_heads, q.shape[2], self.length)
        found = scaled_dot_product_attention(
            own, keys, values, self.mask, is_causal=self.is_causal, enable_gqa=own.shape[1] != kv_heads
        )
        out[rows].view(self.num_chunks, self.count, *q.shape[1:]).copy_(found.transpose(1, 2))


def _halves(gathered: torch.Tensor, num_rows: int, heads: int, head_dim: int, length: int) -> list[torch.Tensor]:
    """K and V, each [N, heads, length, head_dim], out of the blocks that were gathered for N sequences."""
    slots = gathered.view(2, num_rows, -1, heads, head_dim)[:, :, :length]
    return list(slots.transpose(2, 3).unbind())


def _buckets(lengths: Ints) -> list[Ints]:
    """Split rows so that none is padded to more than twice its length, short ones aside. Row numbers are ascending."""
    if not len(lengths):
        return []
    if lengths.max() <= max(_SHORT_TOKENS, 2 * lengths.min()):
        return [np.arange(len(lengths))]
    buckets, left = [], np.arange(len(lengths))
    while len(left):
        longest = lengths[left].max()
        together = lengths[left] * 2 >= longest if longest > _SHORT_TOKENS else np.full(len(left), True)
        buckets.append(left[together])
        left = left[~together]
    return buckets
