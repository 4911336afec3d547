"""Which idle thing leaves the pool first: one order for adapters, cached prefixes and what preempted sequences have
computed. Knows values, not contents.

Something is *idle* when no running sequence needs it: it stays until its pages are wanted. `Reclaimer` keeps the idle
things in the order of a score that the policy gives each when it becomes idle; every change costs O(log idle).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import exp, log
from typing import Protocol

from interleaf.memory.allocator import OwnerKind, PageAllocator


class Evictable(ABC):
    """Something that holds pages and can be brought back.

    Attributes:
        num_pages: pages that are free once it has been evicted.
        uses: requests that wanted it, old ones counting less (`CostAware`); as of `stamp`.
        stamp: the policy's clock when it was used last.
        depth: among equals the deepest leaves first: a sequence's last page before its first.
        ticket: of its entry in the Reclaimer's heap; None while it is not idle.
    """

    __slots__ = ("depth", "kind", "num_pages", "stamp", "ticket", "uses")

    def __init__(self, kind: OwnerKind, num_pages: int, *, depth: int = 0, uses: float = 0.0) -> None:
        self.kind = kind
        self.num_pages = num_pages
        self.uses = uses
        self.stamp = 0
        self.depth = depth
        self.ticket: int | None = None

    @abstractmethod
    def evict(self) -> None:
        """Give the pages back now. Called by the Reclaimer, which has forgotten it already."""

    def cost_s(self, costs: PageCosts) -> float:
        """Seconds to bring one of its pages back."""
        return costs.prefix_s if self.kind is OwnerKind.PREFIX else costs.adapter_s


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Seconds to bring one page back. Measured or estimated by whoever builds the engine.

    Attributes:
        adapter_s: page bytes / copy rate.
        prefix_s: page tokens / prefill rate.
    """

    adapter_s: float = 1.0
    prefix_s: float = 1.0

    @property
    def swap_s(self) -> float:
        """To the host and back: two copies."""
        return 2 * self.adapter_s


class EvictionPolicy(Protocol):
    """Says what an idle thing is worth. A score is asked for once, when the thing becomes idle, and kept until its next
    use: so scores given at different times must compare as the worths do now.

    Attributes:
        costs: may be replaced at any time; what is idle then keeps its score until its next use.
    """

    costs: PageCosts

    def tick(self) -> None:
        """A request has arrived: the clock of `used`."""

    def used(self, item: Evictable) -> None:
        """A request wants it. The item is not idle, or is taken out and put back by the caller."""

    def released(self, item: Evictable) -> None:
        """The last running sequence that used it has left."""

    def score(self, item: Evictable) -> float:
        """The least leaves first."""

    def score_of_wanted(self, item: Evictable, within: int) -> float:
        """The score of something that is sure to be used by one of the next `within` requests."""


class Lru:
    """Least recently used first: the plain baseline. Recency is all that counts, whatever a thing costs.

    Args:
        costs: for those who choose between two ways to bring a page back; not for the order.
    """

    def __init__(self, costs: PageCosts | None = None) -> None:
        self.costs = costs or PageCosts()
        self._clock = 0

    def tick(self) -> None:
        pass

    def used(self, item: Evictable) -> None:
        self._clock += 1
        item.stamp = self._clock

    def released(self, item: Evictable) -> None:
        self.used(item)

    def score(self, item: Evictable) -> float:
        return float(item.stamp)

    def score_of_wanted(self, item: Evictable, within: int) -> float:
        return float(self._clock + 1)


class CostAware:
    """The cost to bring a page back times the chance that it will be wanted.

    The chance is a count of past uses in which a use weighs half as much after every `half_life` requests, so that it
    holds recency and frequency in one number (LRFU: Lee et al., IEEE ToC 2001; with a cost per size it is the idea of
    GreedyDual-Size-Frequency). All counts decay alike, hence the order of two idle things never changes, and

        log worth = log cost + log uses + stamp * ln 2 / half_life        (the same for both terms of time left out)

    may be computed once.

    What a preempted sequence has computed is sure to be used, and next: it comes before all that have not started.

    Args:
        half_life: in requests. Long suits a steady popularity, short one that shifts.
    """

    def __init__(self, costs: PageCosts | None = None, *, half_life: float = 2000.0) -> None:
        self.costs = costs or PageCosts()
        self._decay = log(2.0) / half_life
        self._clock = 0

    def tick(self) -> None:
        self._clock += 1

    def used(self, item: Evictable) -> None:
        item.uses = item.uses * exp((item.stamp - self._clock) * self._decay) + 1.0
        item.stamp = self._clock

    def released(self, item: Evictable) -> None:
        pass

    def score(self, item: Evictable) -> float:
        if item.kind is OwnerKind.KV:
            return self.score_of_wanted(item, within=1)
        return self._worth(item, item.uses, item.stamp)

    def score_of_wanted(self, item: Evictable, within: int) -> float:
        # Whoever is used once in so many requests, for ever, has a count of 1 / (within * decay).
        return self._worth(item, 1.0 / (within * self._decay), self._clock)

    def _worth(self, item: Evictable, uses: float, moment: int) -> float:
        return log(item.cost_s(self.costs)) + log(max(uses, 1e-30)) + moment * self._decay


class Reclaimer:
    """The idle things, and how to make room by evicting them.

    Attributes:
        num_idle_pages: pages that would be free if everything idle were evicted.
    """

    def __init__(self, allocator: PageAllocator, policy: EvictionPolicy) -> None:
        self._allocator = allocator
        self.policy = policy
        self._heap: list[tuple[float, int, int, Evictable]] = []
        self._num_tickets = 0
        self._num_idle = 0
        self.num_idle_pages = 0

    def add(self, item: Evictable) -> None:
        """It is idle from now on."""
        assert item.ticket is None
        self._num_tickets += 1
        item.ticket = self._num_tickets
        self._num_idle += 1
        self.num_idle_pages += item.num_pages
        heapq.heappush(self._heap, (self.policy.score(item), -item.depth, item.ticket, item))
        if len(self._heap) > 2 * self._num_idle + 64:
            self._heap = [entry for entry in self._heap if entry[3].ticket == entry[2]]
            heapq.heapify(self._heap)

    def discard(self, item: Evictable) -> None:
        """It is needed again, or gone. Its entry in the heap is left to be skipped."""
        if item.ticket is not None:
            item.ticket = None
            self._num_idle -= 1
            self.num_idle_pages -= item.num_pages

    def touch(self, item: Evictable) -> None:
        """A request wants it, idle or not."""
        is_idle = item.ticket is not None
        self.discard(item)
        self.policy.used(item)
        if is_idle:
            self.add(item)

    def make_room(self, num_pages: int) -> bool:
        """Evict what is worth least until `num_pages` are free.

        Returns: whether they are. When it cannot be had, nothing is evicted.
        """
        if num_pages > self._allocator.num_free_pages + self.num_idle_pages:
            return False
        while self._allocator.num_free_pages < num_pages:
            self._evict(self._pop()[3])
        return True

    def make_room_for(self, wanted: Evictable, within: int, num_pages: int) -> bool:
        """The same, but evict only what is worth less than something that one of the next `within` requests needs."""
        short = num_pages - self._allocator.num_free_pages
        if short > self.num_idle_pages:
            return False
        limit = self.policy.score_of_wanted(wanted, within)
        victims: list[tuple[float, int, int, Evictable]] = []
        while short > 0 and self._num_idle > len(victims):
            entry = self._pop()
            victims.append(entry)
            if entry[0] >= limit:
                break
            short -= entry[3].num_pages
        if short > 0:
            for entry in victims:
                heapq.heappush(self._heap, entry)
            return False
        for *_, ticket, item in victims:
            if item.ticket == ticket:  # else it went with another one
                self._evict(item)
        return True

    def _pop(self) -> tuple[float, int, int, Evictable]:
        """Take the entry of least worth out of the heap. There is one."""
        while True:
            entry = heapq.heappop(self._heap)
            if entry[3].ticket == entry[2]:
                return entry

    def _evict(self, item: Evictable) -> None:
        self.discard(item)
        item.evict()
