"""What a runner remembers of every seat, and the batch that a plan makes of it. Computes no logits.

Tables, lengths and last tokens persist from step to step; a plan changes the few that it names. Rows are in the plan's
order, decode seats and then chunks, and are never put in another order for the sake of adapters.
"""

from __future__ import annotations

import numpy as np
import torch

from interleaf.attention import AttentionBackend, AttentionRows, ChunkRows
from interleaf.core import AdapterUid, PooledLayout, SeatGrow, SeatStart, StepPlan
from interleaf.kernels import LoraWork, PooledAdapter, build_work
from interleaf.memory.page_table import Ints, PageTable
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Batch

_Composition = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
"""Decode seats, and (seat, rows) of each chunk."""


class SeatInputs:
    """State of all seats and of the adapters in the pool, on one rank. One thread owns it.

    Attributes:
        table: page tables and lengths.
    """

    def __init__(self, num_seats: int, pool: PagePool, attention: AttentionBackend) -> None:
        self.table = PageTable(num_seats, pool.geometry.page_tokens)
        self._geometry = pool.geometry
        self._device = device = pool.data.device
        self._attention = attention
        self._token_ids: list[Ints | None] = [None] * num_seats
        self._adapter_of: list[AdapterUid | None] = [None] * num_seats
        self._adapters: dict[AdapterUid, PooledAdapter] = {}
        # The token that a seat's next decode row reads. It stays on the device: the host may not have seen it yet.
        self._last_token = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._composition: _Composition | None = None
        self._work: LoraWork | None = None

    def vacate(self, seat: int) -> None:
        """A seat's occupant has left."""
        self.table.vacate(seat)
        self._token_ids[seat] = None
        self._adapter_of[seat] = None
        self._composition = None

    def evict(self, uid: AdapterUid) -> None:
        """An adapter's pages are somebody else's now."""
        self._adapters.pop(uid, None)
        self._composition = None

    def loaded(self, uid: AdapterUid, layout: PooledLayout, pages: tuple[int, ...]) -> None:
        """An adapter lies in these pages."""
        self._adapters[uid] = PooledAdapter(
            layout,
            pages,
            num_layers=self._geometry.num_layers,
            lane_elems=self._geometry.lane_elems,
            device=self._device,
        )

    def start(self, start: SeatStart) -> None:
        """A sequence takes a free seat."""
        self.table.start(start.seat, start.pages)
        self.table.lengths[start.seat] = start.num_cached
        self._token_ids[start.seat] = np.array(start.token_ids, dtype=np.int64)
        self._adapter_of[start.seat] = start.adapter
        self._composition = None

    def grow(self, grow: SeatGrow) -> None:
        """A seat has more pages."""
        self.table.grow(grow.seat, grow.pages)

    def batch(self, plan: StepPlan) -> Batch:
        """The rows of a plan whose changes of seats have been applied. Moves lengths on past them."""
        decode = np.array(plan.decode, dtype=np.int64)
        chunks = tuple(ChunkRows(c.seat, c.first, c.count) for c in plan.chunks)
        for chunk in chunks:
            length = self.table.lengths[chunk.seat]
            assert length == chunk.first, f"seat {chunk.seat} has {length} tokens, its chunk begins at {chunk.first}"
        seats = torch.from_numpy(decode)
        token_ids, positions = self._last_token.index_select(0, seats), torch.from_numpy(self.table.lengths[decode])
        sampled = None
        if chunks:
            token_ids = torch.cat([token_ids, *(torch.from_numpy(self._chunk_tokens(c)) for c in chunks)])
            positions = torch.cat([positions, *(torch.arange(c.first, c.first + c.count) for c in chunks)])
            sampled = self._sampled_rows(plan)
        batch = Batch(
            token_ids=token_ids,
            positions=positions.to(self._device),
            attention=self._attention.prepare(AttentionRows(self.table, decode, chunks)),
            sampled=sampled,
            lora=self._lora(plan),
        )
        self.table.advance(decode, 1)
        for chunk in chunks:
            self.table.lengths[chunk.seat] += chunk.count
        return batch

    def sampled(self, seats: Ints, token_ids: torch.Tensor) -> None:
        """Keep the tokens that these seats were given."""
        self._last_token.index_copy_(0, torch.from_numpy(seats), token_ids)

    def _chunk_tokens(self, chunk: ChunkRows) -> Ints:
        known = self._token_ids[chunk.seat]
        assert known is not None, f"seat {chunk.seat} is free"
        assert chunk.first + chunk.count <= len(known), f"seat {chunk.seat} has {len(known)} known tokens only"
        return known[chunk.first : chunk.first + chunk.count]

    def _sampled_rows(self, plan: StepPlan) -> torch.Tensor:
        last = len(plan.decode) - 1 + np.cumsum([c.count for c in plan.chunks])
        ending = [row for row, chunk in zip(last.tolist(), plan.chunks, strict=True) if chunk.samples]
        return torch.tensor([*range(len(plan.decode)), *ending], dtype=torch.int64, device=self._device)

    def _lora(self, plan: StepPlan) -> LoraWork | None:
        """The work list of a plan's rows; that of the step before, if the same seats compute as many rows again."""
        composition = (plan.decode, tuple((c.seat, c.count) for c in plan.chunks))
        if composition != self._composition:
            rows = [(seat, 1) for seat in plan.decode] + list(composition[1])
            self._work = build_work(self._segments(rows))
            self._composition = composition
        return self._work

    def _segments(self, rows: list[tuple[int, int]]) -> list[tuple[PooledAdapter | None, int, int]]:
        """(adapter, first row, rows) of each run of rows that share an adapter."""
        segments: list[tuple[PooledAdapter | None, int, int]] = []
        previous: AdapterUid | None = None
        first = 0
        for seat, count in rows:
            uid = self._adapter_of[seat]
            if segments and uid == previous:
                adapter, begin, so_far = segments[-1]
                segments[-1] = (adapter, begin, so_far + count)
            else:
                segments.append((None if uid is None else self._adapters[uid], first, count))
            previous = uid
            first += count
        return segments
