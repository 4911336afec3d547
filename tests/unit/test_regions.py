"""One pool for all, or an adapters' share of their own: disjoint pages, and books that add up."""

from __future__ import annotations

import pytest

from interleaf.core import AdapterUid
from interleaf.errors import OutOfPages
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import CostAware, Evictable, Lru
from interleaf.memory.regions import Regions, SequenceRegion

KV, ADAPTER = PageOwner(OwnerKind.KV, "a#0"), PageOwner(OwnerKind.ADAPTER, "b")


def test_without_a_split_all_share_one_allocator() -> None:
    regions = Regions.of(10, None)
    assert regions.sequences is regions.adapters
    assert not regions.are_split
    regions.sequences.alloc(3, KV)
    regions.adapters.alloc(4, ADAPTER)
    assert (regions.num_pages, regions.num_free_pages) == (10, 3)
    assert [regions.num_used_pages(kind) for kind in OwnerKind] == [3, 0, 4]
    regions.check()


@pytest.mark.parametrize(("split", "adapters"), [(0.3, 3), (0.5, 5), (0.001, 1), (0.999, 10), (0.25, 2)])
def test_a_split_pool_has_every_page_in_one_region(split: float, adapters: int) -> None:
    regions = Regions.of(10, split)
    assert (regions.num_pages, regions.adapters.num_pages, regions.sequences.num_pages) == (10, adapters, 10 - adapters)
    pages = regions.adapters.alloc(adapters, ADAPTER)
    if adapters < 10:
        pages += regions.sequences.alloc(10 - adapters, KV)
    assert sorted(pages) == list(range(10))
    assert regions.num_free_pages == 0
    regions.check()


def test_neither_takes_the_others_pages_nor_gives_them_back() -> None:
    regions = Regions.of(10, 0.3)
    with pytest.raises(OutOfPages):
        regions.adapters.alloc(4, ADAPTER)
    pages = regions.sequences.alloc(7, KV)
    assert regions.adapters.num_free_pages == 3
    with pytest.raises((AssertionError, IndexError)):
        regions.adapters.free(pages, KV)
    foreign = regions.adapters.alloc(1, ADAPTER)
    with pytest.raises((AssertionError, IndexError)):
        regions.sequences.free(foreign, ADAPTER)
    assert [regions.num_used_pages(kind) for kind in OwnerKind] == [7, 0, 1]
    assert [regions.num_peak_pages(kind) for kind in OwnerKind] == [7, 0, 1]


def test_an_allocator_may_begin_anywhere() -> None:
    allocator = PageAllocator(3, first_page=7)
    pages = allocator.alloc(3, KV)
    assert pages == (7, 8, 9)
    assert allocator.owner(8) == KV
    allocator.free(pages, KV)
    assert allocator.alloc(2, ADAPTER) == (9, 8)
    allocator.check()


class Idle(Evictable):
    def __init__(self, allocator: PageAllocator, owner: PageOwner, count: int) -> None:
        super().__init__(owner.kind, count)
        self.pages = allocator.alloc(count, owner)
        self.free = lambda: allocator.free(self.pages, owner)
        self.is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True
        self.free()


@pytest.mark.parametrize("policy", [Lru(), CostAware()], ids=["lru", "cost"])
def test_room_for_sequences_is_made_of_what_is_theirs(policy: Lru | CostAware) -> None:
    regions = Regions.of(10, 0.5)
    region = SequenceRegion(regions.sequences, policy)
    theirs = Idle(regions.sequences, PageOwner(OwnerKind.PREFIX, ""), 4)
    region.reclaimer.add(theirs)
    idle_adapter = regions.adapters.alloc(5, ADAPTER)
    assert not region.make_room(6, [AdapterUid("b")])
    assert not theirs.is_evicted
    assert region.make_room(3)
    assert theirs.is_evicted
    assert regions.sequences.num_free_pages == 5
    assert regions.adapters.owner(idle_adapter[0]) == ADAPTER
