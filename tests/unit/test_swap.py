"""What becomes of a preempted sequence's pages: kept, swapped to the host or dropped; on a runner without tensors.

The fake runner remembers what every slot of KV was computed from, on the host too, so a page that comes back to the
wrong place, too late or for somebody else fails there.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from interleaf.core import (
    AdapterUid,
    Request,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokenEvent,
)
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import CostAware, Evictable, EvictionPolicy, Lru, PageCosts, Reclaimer
from interleaf.memory.kept import KeptPages
from interleaf.memory.prefix import PrefixCache, PrefixPage
from interleaf.memory.swap import SwapSpace
from interleaf.scheduler.admission import Estimated, Optimistic
from tests.support.fake_engine import EOS, FakeSystem, expected_tokens

SWAP = PageCosts(adapter_s=1.0, prefix_s=100.0)
"""A page is swapped in 2 s, or computed again in 100."""
RECOMPUTE = PageCosts(adapter_s=1.0, prefix_s=1.5)
POLICIES: dict[str, Callable[[PageCosts], EvictionPolicy]] = {"lru": Lru, "cost": CostAware}


def request(id_: str, prompt: tuple[int, ...], max_tokens: int = 12, adapter: str | None = None, n: int = 1) -> Request:
    uid = None if adapter is None else AdapterUid(adapter)
    return Request(id=id_, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, n=n), adapter=uid)


def tight(costs: PageCosts = SWAP, **settings: object) -> FakeSystem:
    """Ten pages of two tokens, for four sequences of up to eight pages each."""
    defaults: dict[str, object] = {
        "num_pages": 10, "page_tokens": 2, "max_num_seqs": 4, "max_batch_tokens": 32, "eviction": CostAware(costs),
        "swap_slots": 100,
    }  # fmt: skip
    return FakeSystem(**(defaults | settings))  # type: ignore[arg-type]


def run(system: FakeSystem, limit: int = 2000) -> tuple[dict[tuple[str, int], list[int]], list[object]]:
    """Steps until nothing is open. Returns: tokens by sequence, and the terminal events."""
    tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
    terminal: list[object] = []
    for _ in range(limit):
        if not system.engine.has_work:
            break
        for event in system.engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.request_id, event.index].append(event.token_id)
            else:
                terminal.append(event)
        balance(system)
    assert not system.engine.has_work, system.scheduler.waiting_by_reason()
    return dict(tokens), terminal


def balance(system: FakeSystem) -> None:
    system.allocator.check()
    system.prefixes.check()
    system.residency.check()
    system.swap.check()


def nothing_is_held(system: FakeSystem) -> None:
    balance(system)
    assert system.allocator.num_used_pages(OwnerKind.KV) == 0
    assert system.swap.num_used_slots == 0
    system.swap.begin_plan()
    assert all(system.swap.owner(slot) is None for slot in range(system.swap.num_slots))


def submit_four(system: FakeSystem, stop_ids: frozenset[int] = frozenset()) -> None:
    for i in range(4):
        system.engine.submit(request(f"r{i}", (i + 1, 2, 3)), stop_ids, seed=i)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
def test_tokens_are_those_of_a_run_without_preemption_whichever_way_is_cheaper(
    costs: PageCosts, lookahead: int, prefix_cache: bool, policy: str
) -> None:
    system = tight(costs, lookahead=lookahead, prefix_cache=prefix_cache, eviction=POLICIES[policy](costs))
    submit_four(system)
    tokens, _ = run(system)
    for i in range(4):
        assert tokens[f"r{i}", 0] == expected_tokens(None, i, (i + 1, 2, 3), 12, ignore_eos=True)
    assert system.scheduler.num_preemptions > 0
    of, copies = system.scheduler.resumed, system.swap.counts
    assert of.kept + of.swapped + of.recomputed == system.scheduler.num_preemptions
    if costs is SWAP:
        assert copies.out_pages >= copies.in_pages > 0
        assert of.recomputed == of.recomputed_tokens == 0
    else:
        assert copies.out_pages == 0
        assert of.recomputed_tokens > 0
    nothing_is_held(system)


def test_without_room_on_the_host_everything_that_leaves_is_computed_again() -> None:
    system = tight(SWAP, swap_slots=0)
    submit_four(system)
    run(system)
    assert system.scheduler.resumed.recomputed > 0
    assert not any(plan.swap_out or plan.swap_in for plan in system.runner.plans)


def test_a_swapped_sequence_computes_one_token_when_it_goes_on() -> None:
    system = tight()
    submit_four(system)
    run(system)
    chunks = [
        (start.num_cached, len(start.token_ids), chunk.count)
        for plan in system.runner.plans
        if plan.swap_in
        for start in plan.start
        for chunk in plan.chunks
        if chunk.seat == start.seat
    ]
    assert chunks
    assert all(cached == known - 1 and count == 1 for cached, known, count in chunks)


def test_costs_that_change_while_sequences_are_preempted_change_the_choice() -> None:
    system = tight(RECOMPUTE)
    submit_four(system)
    for _ in range(12):
        system.engine.step()
    assert system.scheduler.num_preemptions > 0
    assert system.swap.counts.out_pages == 0
    system.eviction.costs = SWAP
    run(system)
    assert system.swap.counts.in_pages > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 3, 100])
def test_random_traffic_with_adapters_gives_the_right_tokens_and_the_same_plans_twice(seed: int, slots: int) -> None:
    def serve() -> FakeSystem:
        rng = random.Random(seed)
        system = tight(
            SWAP, num_pages=18, swap_slots=slots, prefix_cache=seed % 2 > 0, lookahead=seed % 3 > 0,
            adapters={"a": 2, "b": 4}, admission=Optimistic() if seed < 4 else Estimated(prior=2),
            eviction=POLICIES[("lru", "cost")[seed % 2]](SWAP),
        )  # fmt: skip
        wanted = {}
        for i in range(30):
            prompt = (*((1, 2, 3, 4, 5, 6)[: rng.choice([0, 4, 6])]), *rng.choices(range(1, 9), k=rng.randint(1, 5)))
            wanted[f"r{i}"] = (rng.choice([None, "a", "b"]), i, prompt, rng.randint(1, 14))
            adapter, _, _, max_tokens = wanted[f"r{i}"]
            system.engine.submit(request(f"r{i}", prompt, max_tokens, adapter), frozenset(), seed=i)
        tokens, _ = run(system)
        for id_, (adapter, number, prompt, max_tokens) in wanted.items():
            assert tokens[id_, 0] == expected_tokens(adapter, number, prompt, max_tokens, ignore_eos=True), id_
        nothing_is_held(system)
        return system

    system = serve()
    if slots == 100 and seed < 4:
        assert system.swap.counts.in_pages > 0
    assert serve().runner.plans == system.runner.plans


def test_a_sequence_that_goes_on_before_its_pages_were_wanted_takes_them_back() -> None:
    system = tight(num_pages=7, max_num_seqs=2, swap_slots=0)
    system.engine.submit(request("old", (1, 2, 3), 5), frozenset(), seed=1)  # four pages in the end
    system.engine.submit(request("young", (4, 5, 6), 9), frozenset(), seed=2)  # six
    tokens, _ = run(system)
    assert tokens["young", 0] == expected_tokens(None, 2, (4, 5, 6), 9, ignore_eos=True)
    (again,) = [s for plan in system.runner.plans for s in plan.start if len(s.token_ids) > s.prompt_tokens]
    assert system.scheduler.num_preemptions == 1
    assert again.seed == 2
    of = system.scheduler.resumed
    assert of.recomputed_tokens == len(again.token_ids) - 1 - again.num_cached
    assert again.num_cached >= 4, "all pages but those that were wanted are where they were"


# ------------------------------------------------------------------ ends


def swapped_out(system: FakeSystem) -> str:
    """Steps until somebody is in host memory. Returns: the request's id."""
    for _ in range(200):
        system.engine.step()
        if system.swap.num_used_slots:
            (*_, last) = (
                s for e in system.scheduler._open.values() for s in e.sequences if s.kept and s.kept.num_slots
            )
            return last.request_id
    raise AssertionError("nobody was swapped out")


def test_an_abort_while_swapped_frees_the_slots() -> None:
    system = tight()
    submit_four(system)
    id_ = swapped_out(system)
    used = system.swap.num_used_slots
    system.engine.abort(id_)
    assert system.swap.num_used_slots < used
    balance(system)
    _, terminal = run(system)
    assert RequestAborted(id_) in terminal
    nothing_is_held(system)


def test_one_of_several_continuations_can_be_ended_while_it_is_swapped() -> None:
    system = tight()
    system.engine.submit(request("many", (1, 2, 3), n=4), frozenset(), seed=0)
    swapped_out(system)
    (*_, last) = (s for e in system.scheduler._open.values() for s in e.sequences if s.kept and s.kept.num_slots)
    system.engine.abort("many", last.index)
    _, terminal = run(system)
    assert terminal == [RequestFinished("many")]
    nothing_is_held(system)


@pytest.mark.parametrize("seed", range(20))
def test_an_end_by_token_in_flight_or_right_after_going_on_leaves_nothing_behind(seed: int) -> None:
    system = tight()
    for i in range(4):
        system.engine.submit(request(f"r{i}", (i + 1, 2, 3)), frozenset({EOS, 1, 2}), seed=20 * seed + i)
    _, terminal = run(system)
    assert sorted(e.request_id for e in terminal) == [f"r{i}" for i in range(4)]  # type: ignore[attr-defined]
    nothing_is_held(system)


def test_closing_the_engine_or_a_failed_step_frees_pages_and_slots() -> None:
    for fails in (False, True):
        system = tight()
        submit_four(system)
        swapped_out(system)
        if fails:
            system.runner.fail_at_step = len(system.runner.plans)
            _, terminal = run(system)
            assert all(isinstance(event, RequestFailed) for event in terminal)
        else:
            system.engine.close()
        nothing_is_held(system)


# ------------------------------------------------------------------ beside the prefix cache


def test_pages_that_others_have_used_stay_with_the_prefix_cache_and_the_rest_is_swapped() -> None:
    system = tight(prefix_cache=True, num_pages=12)
    system.engine.submit(request("first", (1, 2, 3, 4, 5), 1), frozenset(), seed=9)
    run(system)
    for i in range(3):
        system.engine.submit(request(f"r{i}", (1, 2, 3, 4, 5 + i), 14), frozenset(), seed=i)
    tokens, _ = run(system)
    for i in range(3):
        assert tokens[f"r{i}", 0] == expected_tokens(None, i, (1, 2, 3, 4, 5 + i), 14, ignore_eos=True)
    assert system.swap.counts.in_pages > 0
    shared = [start.pages[:2] for plan in system.runner.plans[1:] for start in plan.start]
    assert len(shared) > 3
    assert len(set(shared)) == 1, "two pages are everybody's, whoever was preempted meanwhile"
    nothing_is_held(system)


def test_what_a_preempted_sequence_takes_back_is_shared_again() -> None:
    system = tight(prefix_cache=True)
    submit_four(system)
    again = None
    while again is None:  # somebody who was preempted, and has a seat again
        system.engine.step()
        starts = [start for start in system.runner.plans[-1].start if len(start.token_ids) > 6 and start.num_cached > 4]
        again = starts[0] if starts else None
    for i in range(4):
        if i != again.seed:
            system.engine.abort(f"r{i}")
    system.engine.step()
    system.engine.submit(request("same", (*again.token_ids[:6], 9), 2), frozenset(), seed=77)
    while system.scheduler.num_waiting:
        system.engine.step()
        assert f"r{again.seed}" in system.scheduler._open, "it need not wait for the end of the other one"
    (same,) = (start for plan in system.runner.plans for start in plan.start if start.seed == 77)
    assert same.num_cached == 6 // 2 * 2
    assert same.pages[:3] == again.pages[:3]
    run(system)
    nothing_is_held(system)


def kept_by_hand(
    slots: int, num_computed: int, first: int = 0, costs: PageCosts = SWAP,
    costs_now: Callable[[], PageCosts] | None = None,
) -> tuple[KeptPages, Reclaimer, SwapSpace, PageAllocator]:  # fmt: skip
    """Pages 0, 1 and 2 of two tokens, all of the pool."""
    allocator = PageAllocator(3)
    reclaimer = Reclaimer(allocator, Lru())
    swap = SwapSpace(slots, 2, costs_now or (lambda: costs))
    owner = PageOwner(OwnerKind.KV, "r#0")
    kept = KeptPages(
        allocator, reclaimer, swap, 2, owner=owner, first=first, pages=allocator.alloc(3, owner),
        num_computed=num_computed, place=0,
    )  # fmt: skip
    return kept, reclaimer, swap, allocator


def test_pages_leave_from_the_end_one_by_one() -> None:
    kept, reclaimer, swap, _ = kept_by_hand(slots=5, num_computed=5)
    for wanted in (1, 2, 3):
        assert reclaimer.make_room(wanted)
        assert kept.num_pages == 3 - wanted
    out, _ = swap.take_copies()
    assert [(copy.page, copy.slot) for copy in out] == [(2, 0), (1, 1), (0, 2)]
    assert kept.take(0) == ([], [2, 1, 0])
    assert kept.num_tokens == 5


def test_where_slots_run_out_a_sequence_s_last_page_makes_way_for_one_before_it() -> None:
    kept, reclaimer, swap, _ = kept_by_hand(slots=1, num_computed=6)
    assert reclaimer.make_room(3)
    assert swap.num_used_slots == 1
    out, _ = swap.take_copies()
    assert [(copy.page, copy.slot) for copy in out] == [(0, 0)], "the first page is worth more than those behind it"
    assert kept.num_tokens == 2
    assert kept.take(0) == ([], [0])


def test_a_last_page_with_few_tokens_is_computed_again_though_whole_ones_are_swapped() -> None:
    kept, reclaimer, swap, _ = kept_by_hand(slots=5, num_computed=5, costs=PageCosts(adapter_s=1.0, prefix_s=3.0))
    assert reclaimer.make_room(3)
    assert (kept.num_tokens, swap.num_used_slots) == (4, 2)


def test_once_computing_is_cheaper_what_was_swapped_behind_is_dropped_too() -> None:
    costs = [SWAP]
    kept, reclaimer, swap, _ = kept_by_hand(slots=5, num_computed=6, costs_now=lambda: costs[0])
    assert reclaimer.make_room(1)
    assert (kept.num_tokens, swap.num_used_slots) == (6, 1)
    costs[0] = RECOMPUTE
    assert reclaimer.make_room(2)
    assert (kept.num_tokens, swap.num_used_slots) == (2, 0), "the last page is of no use without the one before it"
    assert swap.take_copies() == ((), ())


def test_pages_that_the_prefix_cache_has_meanwhile_are_given_up() -> None:
    kept, reclaimer, swap, allocator = kept_by_hand(slots=5, num_computed=8, first=1)
    assert reclaimer.make_room(1)
    kept.hold()
    assert kept.take(2) == ([1], [0])
    assert [allocator.owner(page) is None for page in range(3)] == [True, False, True]
    kept, reclaimer, swap, allocator = kept_by_hand(slots=5, num_computed=8, first=1)
    assert reclaimer.make_room(2)
    kept.hold()
    assert kept.take(3) == ([], [0])
    assert (allocator.num_free_pages, swap.num_used_slots) == (3, 1)


def test_what_continues_a_prefix_that_has_left_the_cache_is_dropped() -> None:
    system = tight(prefix_cache=True, num_pages=12, swap_slots=100)
    system.engine.submit(request("first", (1, 2, 3, 4, 5), 1), frozenset(), seed=9)
    run(system)
    for i in range(3):
        system.engine.submit(request(f"r{i}", (1, 2, 3, 4, 5 + i), 14), frozenset(), seed=i)
    id_ = swapped_out(system)
    (seq,) = system.scheduler._open[id_].sequences
    assert seq.kept is not None
    assert seq.kept.first == 2
    for other in list(system.scheduler._open):
        if other != id_:
            system.engine.abort(other)
    assert system.residency.reclaimer.make_room(12), "now all the others have ended, and nothing is left in the pool"
    tokens, _ = run(system)
    number = int(id_[1:])
    expected = expected_tokens(None, number, (1, 2, 3, 4, 5 + number), 14, ignore_eos=True)
    assert tokens[id_, 0] == expected[-len(tokens[id_, 0]) :]
    again = [start for plan in system.runner.plans for start in plan.start if start.seed == number][-1]
    assert again.num_cached == 0, "the slots were of no use"
    nothing_is_held(system)


def test_a_slot_that_a_plan_reads_is_nobody_s_until_the_next_plan() -> None:
    swap = SwapSpace(1, 2, lambda: SWAP)
    one, other = PageOwner(OwnerKind.KV, "one"), PageOwner(OwnerKind.KV, "other")
    slot = swap.take(one)
    assert slot is not None
    swap.copy_in([slot], [3], one)
    assert swap.num_used_slots == 0
    assert swap.take(other) is None
    swap.begin_plan()
    assert swap.take(other) == slot


def test_a_copy_that_nobody_will_read_is_not_planned() -> None:
    swap = SwapSpace(2, 2, lambda: SWAP)
    owner = PageOwner(OwnerKind.KV, "one")
    first, second = swap.take(owner), swap.take(owner)
    assert first is not None
    assert second is not None
    swap.copy_out(7, first)
    swap.copy_out(8, second)
    swap.free([first], owner)
    assert [(copy.page, copy.slot) for copy in swap.take_copies()[0]] == [(8, second)]
    assert swap.counts.out_pages == 1


# ------------------------------------------------------------------ the order


class Idle(Evictable):
    """An adapter or a prefix that somebody used a while ago."""

    __slots__ = ("allocator", "page")

    def __init__(self, allocator: PageAllocator, kind: OwnerKind) -> None:
        super().__init__(kind, 1)
        self.allocator = allocator
        self.page = allocator.alloc(1, PageOwner(kind, "idle"))

    def evict(self) -> None:
        self.allocator.free(self.page, PageOwner(self.kind, "idle"))


@pytest.mark.parametrize("kind", [OwnerKind.ADAPTER, OwnerKind.PREFIX])
def test_what_is_sure_to_be_used_next_stays_longer_than_what_was_used_often(kind: OwnerKind) -> None:
    allocator = PageAllocator(5)
    policy = CostAware(PageCosts(adapter_s=1.0, prefix_s=10.0))
    reclaimer = Reclaimer(allocator, policy)
    idle = Idle(allocator, kind)
    for _ in range(200):
        policy.tick()
        policy.used(idle)
    reclaimer.add(idle)
    swap = SwapSpace(0, 2, lambda: policy.costs)
    kept = []
    for name, place in (("late", 7), ("early", 3)):  # who arrived last was preempted first
        owner = PageOwner(OwnerKind.KV, name)
        kept.append(
            KeptPages(
                allocator, reclaimer, swap, 2, owner=owner, first=0, pages=allocator.alloc(2, owner), num_computed=4,
                place=place,
            )
        )  # fmt: skip
    left = []
    for wanted in range(1, 6):
        assert reclaimer.make_room(wanted)
        left.append((idle.ticket is not None, kept[0].num_pages, kept[1].num_pages))
    assert left == [(False, 2, 2), (False, 1, 2), (False, 0, 2), (False, 0, 1), (False, 0, 0)]


OWNERS = [PageOwner(OwnerKind.KV, name) for name in ("one", "other")]


def one_prefix() -> tuple[PageAllocator, PrefixCache, list[PrefixPage], tuple[int, ...]]:
    """A cache in which a sequence uses the three pages that it has computed."""
    allocator = PageAllocator(9)
    cache = PrefixCache(allocator, Reclaimer(allocator, Lru()), page_tokens=2)
    pages = allocator.alloc(3, OWNERS[0])
    claimed = cache.claim((None, None), [], [1, 2, 3, 4, 5, 6], pages, OWNERS[0])
    cache.computed(claimed, 0)
    return allocator, cache, claimed, pages


def test_a_prefix_that_nobody_has_come_back_for_is_its_sequence_s_own_again() -> None:
    allocator, cache, claimed, pages = one_prefix()
    assert cache.part(claimed, OWNERS[0]) == 0
    assert all(allocator.owner(page) == OWNERS[0] for page in pages)
    assert len(cache) == cache.num_used_pages == 0
    assert cache.find((None, None), [1, 2, 3], 1) == ([], False)
    cache.check()


@pytest.mark.parametrize("others_run", [True, False])
def test_pages_that_another_sequence_has_found_stay_with_the_cache_whether_it_runs_or_not(others_run: bool) -> None:
    allocator, cache, claimed, pages = one_prefix()
    tokens = [1, 2, 3, 4, 9]
    chain, _ = cache.find((None, None), tokens, 1)
    cache.acquire(chain)
    cache.claim((None, None), chain, tokens, [*pages[:2], *allocator.alloc(1, OWNERS[1])], OWNERS[1])
    if not others_run:
        cache.release(chain)
    assert cache.part(claimed, OWNERS[0]) == 2
    assert allocator.owner(pages[2]) == OWNERS[0]
    assert (len(cache), cache.num_used_pages) == (2, 2 if others_run else 0)
    cache.check()


def test_pages_on_which_another_sequence_s_hang_stay_with_the_cache() -> None:
    allocator, cache, claimed, _ = one_prefix()
    own = allocator.alloc(3, OWNERS[1])  # who has computed the same, and goes on differently
    left = cache.leave((None, None), [], [1, 2, 3, 4, 8, 8], 6, own, OWNERS[1], step=1)
    assert left == list(own[:2])
    assert cache.part(claimed, OWNERS[0]) == 2
    chain, _ = cache.find((None, None), [1, 2, 3, 4, 8, 8, 1], 1)
    assert [page.tokens for page in chain] == [(1, 2), (3, 4), (8, 8)]
    cache.check()


@pytest.mark.parametrize("policy", [CostAware, Lru])
@pytest.mark.parametrize("swap_slots", [0, 100])
def test_a_sequence_goes_on_that_needs_all_pages_though_others_have_computed_the_same(
    policy: Callable[[PageCosts], EvictionPolicy], swap_slots: int
) -> None:
    """What it has kept doubles pages that the prefix cache has got meanwhile, and the pool has room for one of both."""
    costs = PageCosts(adapter_s=1.0, prefix_s=100.0)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    system = FakeSystem(
        num_pages=10,
        page_tokens=2,
        max_num_seqs=3,
        max_batch_tokens=64,
        lookahead=1,
        eviction=policy(costs),
        prefix_cache=True,
        swap_slots=swap_slots,
    )
    asked = {"older": ((29,), 6), "long": (prompt, 10), "short": (prompt[:7], 1)}

    def submit(id_: str, seed: int) -> None:
        tokens, most = asked[id_]
        request = Request(id=id_, prompt_token_ids=tokens, params=SamplingParams(max_tokens=most))
        system.engine.submit(request, frozenset(), seed)

    submit("older", 0)
    submit("long", 1)
    told: dict[str, list[int]] = {id_: [] for id_ in asked}
    for step in range(100):
        if step == 5:
            submit("short", 2)
        for event in system.engine.step():
            if isinstance(event, TokenEvent):
                told[event.request_id].append(event.token_id)
        for room in (system.allocator, system.prefixes, system.residency, system.swap):
            room.check()  # type: ignore[union-attr]
    assert system.scheduler.num_preemptions > 0
    assert not system.engine.has_work, system.scheduler.waiting_by_reason()
    for seed, (id_, (tokens, most)) in enumerate(asked.items()):
        assert told[id_] == expected_tokens(None, seed, tokens, most, ignore_eos=True)
