"""What leaves the pool first, and that finding it stays cheap."""

from __future__ import annotations

import random
from math import log

import pytest

from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import CostAware, Evictable, EvictionPolicy, Lru, PageCosts, Reclaimer


class Thing(Evictable):
    """A named thing that holds pages of an allocator."""

    __slots__ = ("allocator", "name", "pages")

    def __init__(
        self, allocator: PageAllocator, name: str, num_pages: int, kind: OwnerKind = OwnerKind.ADAPTER
    ) -> None:
        super().__init__(kind, num_pages)
        self.allocator = allocator
        self.name = name
        self.pages = allocator.alloc(num_pages, PageOwner(kind, name))

    def evict(self) -> None:
        self.allocator.free(self.pages, PageOwner(self.kind, self.name))
        self.pages = ()


def order(reclaimer: Reclaimer, things: list[Thing]) -> list[str]:
    """The names in the order of leaving, found by asking for one page more at a time."""
    names: list[str] = []
    allocator = things[0].allocator
    while reclaimer.num_idle_pages:
        assert reclaimer.make_room(allocator.num_free_pages + 1)
        names += [thing.name for thing in things if not thing.pages and thing.name not in names]
    return names


def test_least_recently_used_counts_nothing_but_recency() -> None:
    allocator = PageAllocator(20)
    reclaimer = Reclaimer(allocator, Lru())
    things = [Thing(allocator, name, 1 + i) for i, name in enumerate("abcd")]
    for thing in things:
        reclaimer.touch(thing)
        reclaimer.add(thing)
    for name in "acca":
        reclaimer.touch(next(thing for thing in things if thing.name == name))
    assert order(reclaimer, things) == ["b", "d", "c", "a"]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_cost_times_decayed_uses_at_any_later_moment(seed: int) -> None:
    rng = random.Random(seed)
    allocator = PageAllocator(200)
    costs, half_life = PageCosts(adapter_s=40e-6, prefix_s=300e-6), 7.0
    policy = CostAware(costs, half_life=half_life)
    reclaimer = Reclaimer(allocator, policy)
    kinds = (OwnerKind.ADAPTER, OwnerKind.PREFIX)
    things = [Thing(allocator, f"t{i}", rng.randint(1, 5), rng.choice(kinds)) for i in range(30)]
    moments: dict[str, list[int]] = {thing.name: [] for thing in things}
    for thing in things:
        policy.tick()
        reclaimer.touch(thing)
        moments[thing.name].append(policy._clock)
        reclaimer.add(thing)
    for _ in range(200):
        policy.tick()
        thing = rng.choice(things[: rng.randint(1, 30)])
        reclaimer.touch(thing)
        moments[thing.name].append(policy._clock)
    now = policy._clock + 5

    def worth(thing: Thing) -> float:
        cost = costs.adapter_s if thing.kind is OwnerKind.ADAPTER else costs.prefix_s
        return cost * sum(0.5 ** ((now - moment) / half_life) for moment in moments[thing.name])

    assert order(reclaimer, things) == [thing.name for thing in sorted(things, key=worth)]


def test_frequency_outlives_a_burst_with_a_long_half_life_and_not_with_a_short_one() -> None:
    left = {}
    for half_life in (1000.0, 1.0):
        allocator = PageAllocator(10)
        policy = CostAware(half_life=half_life)
        reclaimer = Reclaimer(allocator, policy)
        often, lately = things = [Thing(allocator, "often", 1), Thing(allocator, "lately", 1)]
        for thing, uses in ((often, 10), (lately, 2)):
            for _ in range(uses):
                policy.tick()
                reclaimer.touch(thing)
            reclaimer.add(thing)
        left[half_life] = order(reclaimer, things)[0]
    assert left == {1000.0: "lately", 1.0: "often"}


@pytest.mark.parametrize("policy", [Lru(), CostAware()], ids=["lru", "cost"])
def test_when_there_is_not_enough_nothing_leaves(policy: EvictionPolicy) -> None:
    allocator = PageAllocator(10)
    reclaimer = Reclaimer(allocator, policy)
    things = [Thing(allocator, "a", 3), Thing(allocator, "b", 3)]
    for thing in things:
        reclaimer.touch(thing)
        reclaimer.add(thing)
    reclaimer.discard(things[0])
    assert not reclaimer.make_room(8)
    assert things[1].pages
    assert reclaimer.make_room(7)
    assert things[0].pages, "what is in use stays"


def test_for_something_wanted_soon_only_what_is_worth_less_leaves_and_all_or_nothing() -> None:
    allocator = PageAllocator(7)
    policy = CostAware(half_life=log(2) * 12)
    reclaimer = Reclaimer(allocator, policy)
    things = [Thing(allocator, name, 2) for name in "abc"]
    for uses, thing in enumerate(things, start=1):
        for _ in range(uses):
            reclaimer.touch(thing)
        reclaimer.add(thing)
    wanted = Thing(allocator, "wanted", 1)
    # Used once in 5 requests, for ever, it would have counted 12 / 5 uses.
    assert not reclaimer.make_room_for(wanted, 5, 5), "c is worth 3"
    assert all(thing.pages for thing in things)
    assert reclaimer.num_idle_pages == 6
    assert reclaimer.make_room_for(wanted, 5, 4)
    assert [bool(thing.pages) for thing in things] == [False, False, True]
    assert order(reclaimer, things) == ["a", "b", "c"]


def test_ten_thousand_things_used_over_and_over_leave_a_small_heap_and_the_right_order() -> None:
    allocator = PageAllocator(10_000)
    reclaimer = Reclaimer(allocator, Lru())
    things = [Thing(allocator, str(i), 1) for i in range(10_000)]
    for thing in things:
        reclaimer.touch(thing)
        reclaimer.add(thing)
    rng = random.Random(1)
    for _ in range(100_000):
        reclaimer.touch(rng.choice(things))
    assert len(reclaimer._heap) <= 2 * 10_000 + 64
    oldest = min(things, key=lambda thing: thing.stamp)
    assert reclaimer.make_room(1)
    assert not oldest.pages
