"""The free list: all or none, one owner a page, exact accounts."""

import pytest

from interleaf.errors import OutOfPages
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner

KV = PageOwner(OwnerKind.KV, "a#0")
ADAPTER = PageOwner(OwnerKind.ADAPTER, "b")


def test_kv_and_adapters_draw_from_the_same_free_list() -> None:
    allocator = PageAllocator(5)
    kv = allocator.alloc(2, KV)
    adapter = allocator.alloc(3, ADAPTER)
    assert sorted(kv + adapter) == [0, 1, 2, 3, 4]
    assert allocator.num_free_pages == 0
    assert (allocator.num_used_pages(OwnerKind.KV), allocator.num_used_pages(OwnerKind.ADAPTER)) == (2, 3)
    allocator.free(adapter, ADAPTER)
    assert set(allocator.alloc(3, KV)) == set(adapter)
    assert (allocator.num_peak_pages(OwnerKind.KV), allocator.num_peak_pages(OwnerKind.ADAPTER)) == (5, 3)
    allocator.check()


def test_an_allocation_that_does_not_fit_takes_nothing_and_says_the_numbers() -> None:
    allocator = PageAllocator(3)
    allocator.alloc(2, KV)
    with pytest.raises(OutOfPages) as caught:
        allocator.alloc(2, ADAPTER)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert allocator.num_free_pages == 1
    allocator.check()


def test_freeing_twice_or_for_somebody_else_is_caught() -> None:
    allocator = PageAllocator(3)
    pages = allocator.alloc(1, KV)
    with pytest.raises(AssertionError, match="belongs to"):
        allocator.free(pages, ADAPTER)
    allocator.free(pages, KV)
    with pytest.raises(AssertionError, match="belongs to"):
        allocator.free(pages, KV)


@pytest.mark.parametrize("damage", ["leak", "double", "miscount"])
def test_the_invariant_check_sees_every_kind_of_damage(damage: str) -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2, KV)
    allocator.check()
    match damage:
        case "leak":
            allocator._owner[pages[0]] = None
        case "double":
            allocator._free.append(pages[0])
        case "miscount":
            allocator._used[OwnerKind.KV] += 1
    with pytest.raises(AssertionError):
        allocator.check()
