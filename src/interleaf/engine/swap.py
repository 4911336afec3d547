"""Copies pages of preempted sequences between the pool and host memory. Decides nothing; chooses no page and no slot.

Copies are enqueued where the steps are: on a GPU on the stream that computes, on a CPU they are made at once. So a page
is copied after the last step that wrote to it and before the first that writes to it for somebody else, a slot is read
before it is written again, and nobody waits: the host never looks at what lies there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from interleaf.core import PageSwap
from interleaf.memory.pool import PagePool


class HostPages:
    """Slots in host memory for pages of one pool. Methods belong to the thread that executes plans.

    Args:
        memory: [bytes] uint8 on the host; registered with a GPU's driver, or the thread that launches steps waits for
            the copies.
    Attributes:
        slots: [S, L, lane_elems], as many as fit in `memory`.
    """

    def __init__(self, pool: PagePool, memory: torch.Tensor) -> None:
        self._pages = pool.lanes
        self._memory = memory  # is registered for as long as this very tensor lives
        num_slots = pool.geometry.pages_for_bytes(memory.nbytes)
        used = memory[: num_slots * pool.geometry.page_bytes]
        self.slots = used.view(pool.lanes.dtype).view(num_slots, *pool.lanes.shape[1:])

    def copy_out(self, swaps: Sequence[PageSwap]) -> None:
        """Copy pages to their slots."""
        for first, count in _runs(swaps):
            page, slot = first.page, first.slot
            self.slots[slot : slot + count].copy_(self._pages[page : page + count], non_blocking=True)

    def copy_in(self, swaps: Sequence[PageSwap]) -> None:
        """Copy slots to their pages."""
        for first, count in _runs(swaps):
            page, slot = first.page, first.slot
            self._pages[page : page + count].copy_(self.slots[slot : slot + count], non_blocking=True)


def _runs(swaps: Sequence[PageSwap]) -> Iterator[tuple[PageSwap, int]]:
    """(first, count) of each run in which pages and slots are neighbours: one copy each."""
    begin = 0
    for at in range(1, len(swaps) + 1):
        first, count = swaps[begin], at - begin
        if at == len(swaps) or (swaps[at].page, swaps[at].slot) != (first.page + count, first.slot + count):
            yield first, count
            begin = at
