"""What is known of adapters ends with them, however their loads end."""

from __future__ import annotations

import pytest

from interleaf.adapters.residency import AdapterState, Residency
from interleaf.core import AdapterUid
from interleaf.memory.allocator import PageAllocator
from interleaf.memory.eviction import CostAware

A = AdapterUid("a")


@pytest.fixture
def residency() -> Residency:
    return Residency(PageAllocator(8), CostAware())


@pytest.mark.parametrize("fails", [False, True])
def test_an_adapter_removed_during_its_load_is_forgotten_when_the_load_ends(residency: Residency, fails: bool) -> None:
    residency.count_use(A)
    residency.start_load(A, 3)
    residency.remove(A)
    assert residency.state(A) is AdapterState.LOADING, "its copy still writes to its pages"
    end = residency.fail_load if fails else residency.finish_load
    end(A)
    assert residency.state(A) is AdapterState.COLD
    assert residency._known == {}, "every adapter that was ever removed would be kept"
    assert residency._allocator.num_free_pages == 8
    residency.check()


@pytest.mark.parametrize("fails", [False, True])
def test_one_that_somebody_waits_for_is_known_until_nobody_does(residency: Residency, fails: bool) -> None:
    residency.add_waiter(A)
    residency.start_load(A, 3)
    residency.abandon_load(A)
    end = residency.fail_load if fails else residency.finish_load
    end(A)
    assert A in residency._known
    residency.remove_waiter(A)
    residency.remove(A)
    assert residency._known == {}


def test_a_failed_load_of_an_adapter_that_stays_leaves_its_count_of_uses(residency: Residency) -> None:
    residency.count_use(A)
    residency.start_load(A, 3)
    residency.fail_load(A)
    assert residency._known[A].uses == 1.0
    assert residency.counts.failed_loads == 1
    assert residency.start_load(A, 3) != ()
