"""What preempted sequences have computed: pages that stay until they are wanted, then swapped out or dropped.

Pages leave from a sequence's end, one by one, so that what is left continues what is before it:

    | shared, the prefix cache's | kept in the pool | in host memory | gone: to be computed again |
    0                          first                             num_tokens                 num_computed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import Evictable, PageCosts, Reclaimer
from interleaf.memory.swap import SwapSpace

_DEEPEST = 1 << 24
"""More pages than a sequence has."""


class KeptPage(Evictable):
    """One page of a sequence that waits to go on."""

    __slots__ = ("kept", "page")

    def __init__(self, kept: KeptPages, page: int, depth: int) -> None:
        super().__init__(OwnerKind.KV, 1, depth=depth)
        self.kept = kept
        self.page = page

    def evict(self) -> None:
        """Leave, with the pages behind it, which are of no use without it."""
        self.kept.evict(self)

    def cost_s(self, costs: PageCosts) -> float:
        """Whichever way is cheaper."""
        return min(costs.prefix_s, costs.swap_s) if self.kept.may_swap else costs.prefix_s


class KeptPages:
    """The pages that one preempted sequence owns, in the pool and in host memory.

    Args:
        first: pages before them, which the prefix cache has or had.
        pages: the sequence's own, from then on; as many as the tokens up to `num_computed` take.
        num_computed: positions whose KV planned steps have written.
        place: in the order in which sequences go on: of two that are worth as much, the last loses its pages first.
    Attributes:
        num_tokens: positions whose KV is here or before.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        reclaimer: Reclaimer,
        swap: SwapSpace,
        page_tokens: int,
        *,
        owner: PageOwner,
        first: int,
        pages: Sequence[int],
        num_computed: int,
        place: int,
    ) -> None:
        assert num_computed <= (first + len(pages)) * page_tokens < num_computed + page_tokens
        self._allocator = allocator
        self._reclaimer = reclaimer
        self._swap = swap
        self._page_tokens = page_tokens
        self._owner = owner
        self._pages = [KeptPage(self, page, place * _DEEPEST + index) for index, page in enumerate(pages)]
        self._slots: deque[int] = deque()
        self.first = first
        self.num_computed = self.num_tokens = num_computed
        for page in reversed(self._pages):  # by recency too the last page leaves first
            reclaimer.policy.released(page)
        self.let_go()

    @property
    def may_swap(self) -> bool:
        return self._swap.num_slots > 0

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._pages)

    @property
    def num_slots(self) -> int:
        """Pages in host memory."""
        return len(self._slots)

    def hold(self) -> None:
        """The sequence is about to go on: nothing may be evicted."""
        for page in self._pages:
            self._reclaimer.discard(page)

    def let_go(self) -> None:
        """It is not: pages may be evicted."""
        for page in self._pages:
            self._reclaimer.add(page)

    def evict(self, page: KeptPage) -> None:
        """A page and those behind it leave the pool."""
        while True:
            last = self._pages.pop()
            self._reclaimer.discard(last)
            self._move_out(last.page)
            if last is page:
                return

    def take(self, num_shared: int) -> tuple[list[int], list[int]]:
        """The sequence goes on, and takes everything back behind its first `num_shared` pages.

        Args: num_shared: not below `first`, or everything has been dropped; what is here of those pages is given up.
        Returns: pages in the pool, held until now, and slots in host memory that continue them.
        """
        pages, slots = [page.page for page in self._pages], list(self._slots)
        doubles = max(0, num_shared - self.first)
        self._allocator.free(pages[:doubles], self._owner)
        in_slots = max(0, doubles - len(pages))
        self._swap.free(slots[:in_slots], self._owner)
        self._pages.clear()
        self._slots.clear()
        return pages[doubles:], slots[in_slots:]

    def give_up(self, num_shared: int) -> int:
        """The prefix cache has the sequence's first `num_shared` pages: those that are here too are free.

        What is left continues the cache's, and is of no use once those have left.

        Returns: how many pages of the pool are free now.
        """
        doubles = max(0, num_shared - self.first)
        pages, self._pages = self._pages[:doubles], self._pages[doubles:]
        for page in pages:
            self._reclaimer.discard(page)
        self._allocator.free([page.page for page in pages], self._owner)
        slots = [self._slots.popleft() for _ in range(min(doubles - len(pages), len(self._slots)))]
        self._swap.free(slots, self._owner)
        self.first = max(self.first, num_shared)
        return len(pages)

    def drop(self) -> None:
        """Nobody needs them any more, or they are of no use."""
        self.hold()
        self._allocator.free([page.page for page in self._pages], self._owner)
        self._pages.clear()
        self._drop_slots()
        self.num_tokens = 0

    def check(self) -> None:
        """Assert that everything is where it is said to be, while the sequence waits."""
        size, num_here = self._page_tokens, self.first + len(self._pages) + len(self._slots)
        assert all(self._allocator.owner(page.page) == self._owner for page in self._pages)
        assert all(page.ticket is not None for page in self._pages), "a page that waits may be evicted"
        assert all(self._swap.owner(slot) == self._owner for slot in self._slots)
        assert self.num_tokens <= self.num_computed
        assert (not self._pages and not self._slots) or self.num_tokens <= num_here * size < self.num_tokens + size

    def _move_out(self, page: int) -> None:
        """The last page leaves: to a slot if that is cheaper than computing it again and one can be had."""
        index = self.first + len(self._pages)
        begin, size = index * self._page_tokens, self._page_tokens
        slot = None
        if self._swap.pays(min(size, self.num_tokens - begin)):
            slot = self._swap.take(self._owner)
            if slot is None and self._slots:  # what lies behind is of no use without this one
                slot = self._slots.pop()
                self.num_tokens = begin + (1 + len(self._slots)) * size
        if slot is None:
            self._drop_slots()
            self.num_tokens = begin
        else:
            self._slots.appendleft(slot)
            self._swap.copy_out(page, slot)
        self._allocator.free((page,), self._owner)

    def _drop_slots(self) -> None:
        self._swap.free(tuple(self._slots), self._owner)
        self._slots.clear()
