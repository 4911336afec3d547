"""Host memory for pages of preempted sequences: who holds which slot, and what the next plan copies. No torch.

A slot holds what one page held. A plan's copies to the host come before anything that writes to the pages, its copies
from the host after them; so a slot that a plan reads from is given to nobody else within that plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interleaf.core import PageSwap
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import PageCosts


@dataclass(slots=True)
class SwapCounts:
    """Running totals: pages copied to the host, and back."""

    out_pages: int = 0
    in_pages: int = 0


class SwapSpace:
    """The slots, and the copies that are to be planned. Methods are called by the scheduler's thread.

    Invariant: a slot is free, or one sequence's, or read by the plan that is being made.

    Args:
        num_slots: 0: nothing is ever swapped.
        costs: asked whenever there is a choice, so that they may change.
    """

    def __init__(self, num_slots: int, page_tokens: int, costs: Callable[[], PageCosts]) -> None:
        self._slots = PageAllocator(num_slots)
        self._page_tokens = page_tokens
        self._costs = costs
        self._out: dict[int, int] = {}  # page by slot
        self._in: list[PageSwap] = []
        self._read: list[tuple[Sequence[int], PageOwner]] = []
        self.counts = SwapCounts()

    @property
    def num_slots(self) -> int:
        return self._slots.num_pages

    @property
    def num_used_slots(self) -> int:
        """Slots that hold what a sequence will read."""
        return self._slots.num_used_pages(OwnerKind.KV) - sum(len(slots) for slots, _ in self._read)

    def owner(self, slot: int) -> PageOwner | None:
        """Whose slot it is; None if it is free."""
        return self._slots.owner(slot)

    def pays(self, num_tokens: int) -> bool:
        """Whether a page with so many tokens is estimated to be copied out and in sooner than computed again."""
        if not self.num_slots:
            return False
        costs = self._costs()
        return costs.swap_s < costs.prefix_s * num_tokens / self._page_tokens

    def take(self, owner: PageOwner) -> int | None:
        """A free slot for a page of this sequence; None if there is none."""
        return self._slots.alloc(1, owner)[0] if self._slots.num_free_pages else None

    def copy_out(self, page: int, slot: int) -> None:
        """The next plan copies a page to a slot, whatever was to be there."""
        self.counts.out_pages += slot not in self._out
        self._out[slot] = page

    def copy_in(self, slots: Sequence[int], pages: Sequence[int], owner: PageOwner) -> None:
        """The next plan copies these slots to these pages; then the slots are free."""
        assert len(slots) == len(pages), f"{len(slots)} slots for {len(pages)} pages"
        self._in += [PageSwap(page, slot) for page, slot in zip(pages, slots, strict=True)]
        self._read.append((slots, owner))
        self.counts.in_pages += len(slots)

    def free(self, slots: Sequence[int], owner: PageOwner) -> None:
        """Nobody will read these slots."""
        for slot in slots:
            if self._out.pop(slot, None) is not None:
                self.counts.out_pages -= 1
        self._slots.free(slots, owner)

    def begin_plan(self) -> None:
        """What the plan before this one has read is free."""
        if self._read:
            for slots, owner in self._read:
                self._slots.free(slots, owner)
            self._read.clear()

    def take_copies(self) -> tuple[tuple[PageSwap, ...], tuple[PageSwap, ...]]:
        """The copies to the host and those from it, for a plan."""
        if not (self._out or self._in):
            return (), ()
        out = tuple(PageSwap(page, slot) for slot, page in self._out.items())
        back = tuple(self._in)
        self._out.clear()
        self._in.clear()
        return out, back

    def check(self) -> None:
        """Assert the invariant. Costs a walk over all slots."""
        self._slots.check()
        for slot in self._out:
            assert self.owner(slot) is not None, f"slot {slot} is nobody's and is to be written"
