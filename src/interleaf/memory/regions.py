"""Who may use which pages of the pool: everybody all of them, or adapters a share that is theirs. Knows no tensor.

The split is what a pool shared by both replaces. It exists to show what sharing is worth (docs/benchmarks/sim), and for
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from interleaf.core import AdapterUid
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import EvictionPolicy, Reclaimer


def pages_for_sequences(num_pages: int, split: float | None) -> int:
    """Pages that sequences may use, of so many."""
    return num_pages if split is None else num_pages - min(max(1, round(num_pages * split)), num_pages)


@dataclass(frozen=True, slots=True)
class Regions:
    """The pages of the pool by who may use them.

    Attributes:
        sequences: for KV and prefixes.
        adapters: the same allocator, unless the pool is split.
    """

    sequences: PageAllocator
    adapters: PageAllocator

    @classmethod
    def of(cls, num_pages: int, split: float | None) -> Regions:
        """The regions of a pool.

        Args:
            split: the share of the pages that adapters, and nobody else, may use; None: all share all.
        """
        count = pages_for_sequences(num_pages, split)
        sequences = PageAllocator(count)
        return cls(sequences, sequences if split is None else PageAllocator(num_pages - count, first_page=count))

    @property
    def are_split(self) -> bool:
        return self.adapters is not self.sequences

    @property
    def num_pages(self) -> int:
        return sum(region.num_pages for region in self._each())

    @property
    def num_free_pages(self) -> int:
        return sum(region.num_free_pages for region in self._each())

    def num_used_pages(self, kind: OwnerKind) -> int:
        return sum(region.num_used_pages(kind) for region in self._each())

    def num_peak_pages(self, kind: OwnerKind) -> int:
        """See PageAllocator; what a page may hold, only one region holds."""
        return sum(region.num_peak_pages(kind) for region in self._each())

    def owner(self, page: int) -> PageOwner | None:
        """Who holds a page; None if it is free."""
        return (self.sequences if page < self.sequences.num_pages else self.adapters).owner(page)

    def for_sequences(self, policy: EvictionPolicy) -> SequenceRegion | None:
        """The region of sequences, if they have one to themselves."""
        return SequenceRegion(self.sequences, policy) if self.are_split else None

    def check(self) -> None:
        """Assert the invariant of each."""
        for region in self._each():
            region.check()

    def _each(self) -> tuple[PageAllocator, ...]:
        return (self.sequences, self.adapters) if self.are_split else (self.sequences,)


class Room(Protocol):
    """Where the pages of sequences come from: `Residency`, where they share the pool with adapters.

    Attributes:
        reclaimer: the idle things that may be evicted for them.
        num_busy_pages: pages that sequences could have, were they not in use by adapters.
    """

    reclaimer: Reclaimer
    num_busy_pages: int

    def make_room(self, num_pages: int, last_in_line: Iterable[AdapterUid] = ()) -> bool:
        """Evict idle things until so many pages are free. Returns: whether they are; if not, nothing was evicted."""


class SequenceRegion:
    """The pages that only sequences and prefixes may use."""

    def __init__(self, allocator: PageAllocator, policy: EvictionPolicy) -> None:
        self.reclaimer = Reclaimer(allocator, policy)
        self.num_busy_pages = 0

    def make_room(self, num_pages: int, last_in_line: Iterable[AdapterUid] = ()) -> bool:
        """See Room. No adapter can make any."""
        return self.reclaimer.make_room(num_pages)
