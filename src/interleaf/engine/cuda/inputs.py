"""What a GPU's runner remembers of every seat, and the rows that a plan makes of it. Computes no logits.

Page tables live on the device and change by the few entries that a plan names; lengths are kept on the host, where
every change of them is known beforehand. Last tokens are the sampler's: the host may not have seen them yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.attention.device import DeviceRows
from interleaf.core import AdapterUid, SeatGrow, SeatStart, StepPlan
from interleaf.engine.cuda.staging import Staging
from interleaf.kernels import SingleRows
from interleaf.memory.page_table import Ints, PageTable

Segments = Sequence[tuple[Hashable | None, int, int]]
"""(uid of an adapter, first row, rows) of runs of rows that share an adapter; neighbours may share one too."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's rows.

    Attributes:
        device: as attention takes them.
        seats: [S] int64 on the device: who sits where, padding included; decode rows read their last token there.
        chunk_tokens: [T - num_decode] int64 on the device; None in a step of decode rows only.
        sampled: [N] int64 rows whose logits are wanted; None = all.
        sampled_seats: [N] int64 on the device, their seats.
        segments: adapters of the rows.
    """

    device: DeviceRows
    seats: torch.Tensor
    chunk_tokens: torch.Tensor | None
    sampled: torch.Tensor | None
    sampled_seats: torch.Tensor
    segments: Segments


class DeviceInputs:
    """State of all seats. One thread owns it; device work is enqueued on the current stream.

    Args:
        max_pages: pages of the longest sequence.
        scrap_page: page that rows which pad a batch write to; it is nobody's.

    Attributes:
        table: page tables and lengths, on the host.
        device_table: [num_seats + 1, max_pages] int32, page tables on the device; the last row is the padding seat's.
    """

    def __init__(self, num_seats: int, page_tokens: int, max_pages: int, scrap_page: int, device: torch.device) -> None:
        self.table = PageTable(num_seats, page_tokens)
        self.device_table = torch.full((num_seats + 1, max_pages), scrap_page, dtype=torch.int32, device=device)
        self._num_seats = num_seats
        self._scrap_slot = scrap_page * page_tokens
        self._token_ids: list[Ints | None] = [None] * num_seats
        self._adapter_of: list[AdapterUid | None] = [None] * num_seats
        self._entries: list[int] = []  # of the flat table that have changed, and the page of each
        self._pages: list[int] = []
        self._decode: tuple[tuple[int, ...], Ints, Segments] | None = None

    @staticmethod
    def staged_bytes(num_seats: int, max_rows: int, max_pages: int) -> int:
        """Bytes of a step's arrays at most, but for the pages of more sequences than start at a time as a rule."""
        return 64 * (num_seats + 1) + 32 * max_rows + 12 * max(4 * num_seats, 64 * max_pages) + 4096

    def vacate(self, seat: int) -> None:
        """A seat's occupant has left."""
        self.table.vacate(seat)
        self._token_ids[seat] = None
        self._adapter_of[seat] = None

    def start(self, start: SeatStart) -> None:
        """A sequence takes a free seat."""
        self._record(start.seat, 0, start.pages)
        self.table.start(start.seat, start.pages)
        self.table.lengths[start.seat] = start.num_cached
        self._token_ids[start.seat] = np.array(start.token_ids, dtype=np.int64)
        self._adapter_of[start.seat] = start.adapter
        self._decode = None

    def grow(self, grow: SeatGrow) -> None:
        """A seat has more pages."""
        self._record(grow.seat, int(self.table.num_pages[grow.seat]), grow.pages)
        self.table.grow(grow.seat, grow.pages)

    def take_table_changes(self, staging: Staging) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Stage the entries that have changed: (index into the flat table, page). To be applied after the copy."""
        if not self._entries:
            return []
        entries, pages = np.array(self._entries, dtype=np.int64), np.array(self._pages, dtype=np.int32)
        self._entries, self._pages = [], []
        if 12 * len(entries) + 64 <= staging.room():
            return [(staging.put(entries, torch.int64), staging.put(pages, torch.int32))]
        # Very many long prompts at once: a copy that waits, rather than a buffer for the worst case.
        device = self.device_table.device
        return [(torch.from_numpy(entries).to(device), torch.from_numpy(pages).to(device))]

    def apply_table_changes(self, changes: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write the entries. Enqueued after `Staging.send`."""
        for entries, pages in changes:
            self.device_table.view(-1).index_copy_(0, entries, pages)

    def decode_rows(self, plan: StepPlan, capacity: int, num_static: int, staging: Staging) -> Rows:
        """Rows of a plan without chunks, padded to `capacity`, at addresses that are the same in every step.

        Args: num_static: the most rows of any step like this; their arrays are taken in full, so that none moves.
        """
        seats, segments = self._decoding(plan.decode)
        n, positions = len(seats), self.table.lengths[seats]
        i64, i32 = torch.int64, torch.int32
        slots, places, wide_seats = (staging.take(num_static, i64) for _ in range(3))
        narrow_seats, kv_lens, q_starts = (staging.take(num_static + extra, i32) for extra in (0, 0, 1))
        slots.host[:n] = self.table.slots(seats, positions, self.table.page_tokens)
        slots.host[n:capacity] = self._scrap_slot
        places.host[:n] = positions
        places.host[n:capacity] = 0
        wide_seats.host[:n] = seats
        wide_seats.host[n:capacity] = self._num_seats
        narrow_seats.host[:capacity] = wide_seats.host[:capacity]
        kv_lens.host[:n] = positions + 1
        kv_lens.host[n:capacity] = 1
        q_starts.host[: capacity + 1] = np.arange(capacity + 1)
        self.table.advance(seats, 1)
        rows = DeviceRows(
            table=self.device_table,
            seats=narrow_seats.device[:capacity],
            kv_lens=kv_lens.device[:capacity],
            q_starts=q_starts.device[: capacity + 1],
            slots=slots.device[:capacity],
            positions=places.device[:capacity],
            num_decode=capacity,
            host_seats=narrow_seats.host[:capacity],
            host_kv_lens=kv_lens.host[:capacity],
            host_q_lens=np.ones(capacity, dtype=np.int32),
        )
        every = wide_seats.device[:capacity]
        return Rows(rows, every, None, None, every, segments)

    def rows(self, plan: StepPlan, staging: Staging) -> Rows:
        """Rows of any plan: decode seats, then chunks."""
        decode, _ = self._decoding(plan.decode)
        num_decode = len(decode)
        i64, i32 = torch.int64, torch.int32
        chunk_seats = np.array([c.seat for c in plan.chunks], dtype=np.int64)
        counts = np.array([c.count for c in plan.chunks], dtype=np.int64)
        firsts = np.array([c.first for c in plan.chunks], dtype=np.int64)
        wrong = self.table.lengths[chunk_seats] != firsts
        assert not wrong.any(), f"seats {chunk_seats[wrong]} have not come to where their chunks begin"
        seats = np.concatenate([decode, chunk_seats])
        q_lens = np.concatenate([np.ones(num_decode, dtype=np.int64), counts])
        q_starts = np.concatenate([[0], q_lens.cumsum()])
        before = np.concatenate([self.table.lengths[decode], firsts])
        row_seats = seats.repeat(q_lens)
        positions = before.repeat(q_lens) + np.arange(q_starts[-1]) - q_starts[:-1].repeat(q_lens)
        kv_lens = (before + q_lens).astype(np.int32)
        ends = q_starts[1:] - 1
        samples = np.concatenate([np.ones(num_decode, bool), [c.samples for c in plan.chunks]]).astype(bool)
        known = [self._chunk_tokens(c.seat, c.first, c.count) for c in plan.chunks]

        slots = self.table.slots(row_seats, positions, self.table.page_tokens)
        rows = DeviceRows(
            table=self.device_table,
            seats=staging.put(seats, i32),
            kv_lens=staging.put(kv_lens, i32),
            q_starts=staging.put(q_starts, i32),
            slots=staging.put(slots, i64),
            positions=staging.put(positions, i64),
            num_decode=num_decode,
            host_seats=seats.astype(np.int32),
            host_kv_lens=kv_lens,
            host_q_lens=q_lens.astype(np.int32),
        )
        made = Rows(
            device=rows,
            seats=staging.put(seats, i64),
            chunk_tokens=staging.put(np.concatenate(known), i64) if known else None,
            sampled=staging.put(ends[samples], i64),
            sampled_seats=staging.put(seats[samples], i64),
            segments=[
                (self._adapter_of[seat], first, count)
                for seat, first, count in zip(seats.tolist(), q_starts.tolist(), q_lens.tolist(), strict=False)
            ],
        )
        self.table.advance(seats, q_lens)
        return made

    def _decoding(self, decode: tuple[int, ...]) -> tuple[Ints, Segments]:
        """Seats as an array, and their adapters; those of the step before, if the same sequences decode again."""
        if self._decode is None or self._decode[0] is not decode:
            segments = SingleRows(tuple(map(self._adapter_of.__getitem__, decode)))
            self._decode = decode, np.array(decode, dtype=np.int64), segments
        return self._decode[1], self._decode[2]

    def _record(self, seat: int, first: int, pages: Sequence[int]) -> None:
        if pages:
            begin = seat * self.device_table.shape[1] + first
            assert first + len(pages) <= self.device_table.shape[1], f"seat {seat} outgrows the longest sequence"
            self._entries += range(begin, begin + len(pages))
            self._pages += pages

    def _chunk_tokens(self, seat: int, first: int, count: int) -> Ints:
        known = self._token_ids[seat]
        assert known is not None, f"seat {seat} is free"
        assert first + count <= len(known), f"seat {seat} has {len(known)} known tokens only"
        return known[first : first + count]
