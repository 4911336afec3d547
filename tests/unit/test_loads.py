"""Adapters on their way: who waits for them and who does not, look-ahead, limits, and what fails. Without tensors."""

from __future__ import annotations

from interleaf.core import AdapterUid, Event, Request, RequestFailed, RequestFinished, SamplingParams
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.eviction import CostAware
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.sequence import WaitReason
from tests.support.fake_engine import FakeSystem


def submit(system: FakeSystem, id_: str, adapter: str | None = None, max_tokens: int = 6, prompt: int = 2) -> None:
    uid = None if adapter is None else AdapterUid(adapter)
    params = SamplingParams(max_tokens=max_tokens)
    system.engine.submit(
        Request(id=id_, prompt_token_ids=tuple(range(1, 1 + prompt)), params=params, adapter=uid), frozenset(), seed=1
    )


def steps(system: FakeSystem, count: int) -> list[Event]:
    return [event for _ in range(count) for event in system.engine.step()]


def run(system: FakeSystem, limit: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(limit):
        if not system.engine.has_work:
            break
        events += system.engine.step()
        system.allocator.check()
    assert not system.engine.has_work, system.scheduler.waiting_by_reason()
    return events


def started_at(system: FakeSystem) -> list[int]:
    """The step of each start, in order."""
    return [plan.step for plan in system.runner.plans for _ in plan.start]


def loads(system: FakeSystem) -> list[str]:
    return [load.uid for plan in system.runner.plans for load in plan.load]


# ------------------------------------------------------------------ nobody waits for somebody else's load


def test_twenty_slow_loads_cost_resident_and_base_requests_not_one_step() -> None:
    finished = {}
    for num_slow in (0, 20):
        system = FakeSystem({"warm": 2} | {f"s{i}": 2 for i in range(20)}, num_pages=200, max_num_seqs=24)
        submit(system, "warm-up", "warm", 1)
        run(system)
        first = len(system.runner.plans)
        for i in range(num_slow):  # first in line, and each takes 5 seconds
            system.runner.slow_copies.add(f"s{i}")
            submit(system, f"slow{i}", f"s{i}")
        submit(system, "base", None, 20)
        submit(system, "resident", "warm", 20)
        ends = {}
        while len(ends) < 2:
            for event in system.engine.step():
                if isinstance(event, RequestFinished):
                    ends[event.request_id] = len(system.runner.plans) - first
        finished[num_slow] = ends
        assert system.scheduler.num_waiting == num_slow
        if num_slow:
            assert system.scheduler.waiting_by_reason() == {WaitReason.ADAPTER_LOAD: 20}
            system.runner.finish_copies()
            assert len([event for event in run(system) if isinstance(event, RequestFinished)]) == 20
    assert finished[0] == finished[20]


def test_one_free_seat_is_not_kept_for_a_sequence_whose_adapter_is_on_its_way() -> None:
    system = FakeSystem({"cold": 2}, max_num_seqs=1)
    system.runner.slow_copies.add("cold")
    submit(system, "slow", "cold")
    submit(system, "base")
    assert RequestFinished("base") in steps(system, 12)
    system.runner.finish_copies()
    assert RequestFinished("slow") in run(system)


def test_a_burst_of_ten_thousand_cold_adapters_is_asked_about_a_few_at_a_time_and_delays_nobody() -> None:
    system = FakeSystem(
        {f"c{i}": 1 for i in range(10_000)},
        num_pages=64,
        max_num_seqs=16,
        loads=LoadLimits(max_loads=8, prefetch_loads=4),
    )
    system.images.on_disk.update(system.adapters)
    for i in range(10_000):
        submit(system, f"r{i}", f"c{i}", 1)
    submit(system, "base", None, 4)
    for _ in range(10):
        before = system.images.num_asked
        events = system.engine.step()
        assert system.images.num_asked - before <= 8
        if RequestFinished("base") in events:
            break
    else:
        raise AssertionError("the base request waits for others' adapters")
    assert system.scheduler.waiting_by_reason() == {WaitReason.ADAPTER_FETCH: 8, WaitReason.LOAD_LIMIT: 9992}
    for i in range(10_000):
        system.engine.abort(f"r{i}")
    run(system)


# ------------------------------------------------------------------ look-ahead


def full_system(**settings: object) -> FakeSystem:
    """Both seats are taken for 20 steps."""
    system = FakeSystem({"a": 3, "b": 3, "c": 3}, max_num_seqs=2, **settings)  # type: ignore[arg-type]
    for name in ("x", "y"):
        submit(system, name, None, 20)
    steps(system, 2)
    return system


def test_the_adapter_of_the_next_in_line_is_loaded_while_the_seats_are_taken() -> None:
    first_free = {}
    for prefetch in (0, 2):
        system = full_system(loads=LoadLimits(prefetch_loads=prefetch))
        submit(system, "next", "a")
        steps(system, 5)
        assert system.residency.resident() == (("a",) if prefetch else ())
        assert system.scheduler.waiting_by_reason() == {WaitReason.SEATS: 1}
        run(system)
        first_free[prefetch] = started_at(system)[2]
        counts = system.residency.counts
        assert (counts.hits, counts.misses) == ((1, 0) if prefetch else (0, 1))
        assert (counts.prefetches, counts.prefetched_unused) == (prefetch // 2, 0)
    assert first_free[2] < first_free[0]


def test_no_more_is_sent_for_ahead_of_need_than_allowed_and_in_the_order_of_the_line() -> None:
    system = full_system(loads=LoadLimits(prefetch_loads=1))
    system.runner.slow_copies.update("abc")
    for name in "bca":
        submit(system, name, name)
    steps(system, 4)
    assert loads(system) == ["b"]
    system.runner.finish_copies()
    steps(system, 3)
    assert loads(system) == ["b", "c"]
    system.runner.slow_copies.clear()
    system.runner.finish_copies()
    run(system)


def test_nothing_is_loaded_ahead_below_the_low_water_mark() -> None:
    """Two sequences run, so two pages stay free: the adapter's three pages need five."""
    for spare, expected in ((4, []), (5, ["a"])):
        system = full_system(num_pages=8, page_tokens=32, loads=LoadLimits(prefetch_loads=2))
        taken = system.num_pages - system.allocator.num_used_pages(OwnerKind.KV) - spare
        for i in range(taken):  # somebody else's pages
            system.allocator.alloc(1, system.residency._entry(AdapterUid(f"ballast{i}")).owner)
        submit(system, "next", "a")
        steps(system, 3)
        assert loads(system) == expected, spare


def test_what_is_wanted_more_often_is_not_evicted_ahead_of_need() -> None:
    """With a half-life of 2 requests, twelve uses in a row and a pause count 2.4, and one of the next two 1.4."""
    for uses, expected in ((12, []), (1, ["b"])):
        system = FakeSystem(
            {"a": 3, "b": 3}, num_pages=7, page_tokens=32, max_num_seqs=2, loads=LoadLimits(prefetch_loads=2),
            eviction=CostAware(half_life=2),
        )  # fmt: skip
        for i in range(uses):
            submit(system, f"a{i}", "a", 1)
            run(system)
        for name in ("x", "y"):
            submit(system, name, None, 20)
        steps(system, 2)
        submit(system, "ahead", None, 1)
        submit(system, "next", "b")
        steps(system, 3)
        assert loads(system)[1:] == expected, uses
        run(system)


def test_an_adapter_loaded_ahead_is_evicted_for_those_that_run_and_counted_as_unused() -> None:
    system = FakeSystem(
        {"a": 3}, num_pages=8, page_tokens=2, max_num_seqs=1, max_batch_tokens=8, loads=LoadLimits(prefetch_loads=1)
    )
    submit(system, "x", None, 13)
    steps(system, 3)
    submit(system, "next", "a", 1)
    steps(system, 3)
    assert system.residency.resident() == ("a",)
    run(system)
    assert system.scheduler.num_preemptions == 0
    assert system.residency.counts.prefetched_unused == 1
    assert loads(system) == ["a", "a"]


# ------------------------------------------------------------------ faults


def test_a_load_that_hangs_fails_those_that_wait_for_it_and_gives_its_pages_back_when_it_ends() -> None:
    system = FakeSystem({"hangs": 5, "fine": 2}, loads=LoadLimits(timeout_s=30.0))
    system.runner.slow_copies.add("hangs")
    submit(system, "stuck", "hangs")
    submit(system, "other", "fine", 40)
    steps(system, 3)
    system.now_s = 29.0
    assert not any(isinstance(event, RequestFailed) for event in steps(system, 2))
    system.now_s = 31.0
    (failed,) = [event for event in steps(system, 2) if isinstance(event, RequestFailed)]
    assert failed.request_id == "stuck"
    assert "30 s" in failed.reason
    assert len(system.residency.pages(AdapterUid("hangs"))) == 5, "the copy may still write to them"
    submit(system, "again", "hangs")
    assert [event.request_id for event in steps(system, 2) if isinstance(event, RequestFailed)] == ["again"]
    system.runner.finish_copies()
    steps(system, 1)
    assert system.residency.pages(AdapterUid("hangs")) == ()
    system.runner.slow_copies.clear()
    submit(system, "at last", "hangs")
    assert {event.request_id for event in run(system) if isinstance(event, RequestFinished)} == {"other", "at last"}


def test_a_fetch_that_hangs_fails_those_that_wait_for_it() -> None:
    """So it is with a host tier that never finds room."""
    system = FakeSystem({"gone": 2}, loads=LoadLimits(timeout_s=30.0))
    system.images.on_disk.add("gone")
    submit(system, "stuck", "gone")
    submit(system, "base", None, 40)
    steps(system, 3)
    system.now_s = 31.0
    (failed,) = [event for event in steps(system, 2) if isinstance(event, RequestFailed)]
    assert failed.request_id == "stuck"
    assert "host memory" in failed.reason
    assert RequestFinished("base") in run(system)


def test_an_adapter_larger_than_the_pool_fails_its_requests_and_blocks_nobody() -> None:
    system = FakeSystem({"huge": 40, "fine": 2}, num_pages=32)
    submit(system, "r", "huge")
    submit(system, "base")
    submit(system, "ok", "fine")
    events = run(system)
    (failed,) = [event for event in events if isinstance(event, RequestFailed)]
    assert failed.request_id == "r"
    assert "40 pages" in failed.reason
    assert RequestFinished("base") in events
    assert RequestFinished("ok") in events


def test_a_request_that_comes_back_for_an_adapter_under_withdrawal_gets_it() -> None:
    """Its copy is not over when it is withdrawn, and the same contents are registered again meanwhile."""
    system = FakeSystem({"a": 2})
    system.runner.slow_copies.add("a")
    submit(system, "r0", "a")
    steps(system, 2)
    system.engine.abort("r0")
    system.scheduler.forget_adapter(AdapterUid("a"))
    submit(system, "r1", "a")
    steps(system, 1)
    system.runner.slow_copies.clear()
    system.runner.finish_copies()
    assert RequestFinished("r1") in run(system)


def test_a_fetch_whose_first_waiter_has_gone_does_not_keep_those_ahead_of_the_next_one_waiting() -> None:
    """One adapter may be on its way at a time, and one sequence is in reach of a seat."""
    system = FakeSystem({"a": 1, "b": 1}, max_num_seqs=1, loads=LoadLimits(max_loads=1))
    system.images.on_disk.add("b")
    submit(system, "one", "b")
    steps(system, 1)
    submit(system, "two", "a")
    submit(system, "three", "b")
    system.engine.abort("one")
    assert RequestFinished("two") in steps(system, 20)
    system.images.finish_fetches()
    assert RequestFinished("three") in run(system)


def test_an_adapter_is_sent_for_when_a_seat_is_in_reach_and_not_before() -> None:
    """One seat is free, and groups are of three: nobody starts. Two are ahead of the one whose adapter is cold."""
    system = FakeSystem({"a": 1}, num_pages=64, max_num_seqs=4, refill_seats=3, loads=LoadLimits(prefetch_loads=0))
    for i in range(3):
        submit(system, f"runs{i}", None, 12)
    steps(system, 2)
    for i in range(2):
        submit(system, f"ahead{i}")
    submit(system, "cold", "a")
    steps(system, 5)
    assert loads(system) == []
    run(system)
    assert loads(system) == ["a"]


def test_an_adapter_that_somebody_ahead_waits_for_is_not_evicted_for_somebody_behind() -> None:
    system = FakeSystem({"a": 3, "b": 3}, num_pages=7, page_tokens=16, max_num_seqs=4, refill_seats=3)
    submit(system, "warm-up", "a", 1)
    run(system)
    for i in range(2):
        submit(system, f"runs{i}", None, 20)
    steps(system, 2)
    submit(system, "ahead", "a", 1)  # held back, for two seats are free and groups are of three
    submit(system, "behind", "b", 1)
    steps(system, 5)
    assert system.residency.resident() == ("a",)
    assert loads(system) == ["a"]
    assert {event.request_id for event in run(system) if isinstance(event, RequestFinished)} >= {"ahead", "behind"}


# ------------------------------------------------------------------ reasons


def test_every_waiting_sequence_has_a_reason() -> None:
    system = FakeSystem(
        {"loading": 1, "fetched": 1, "third": 1}, max_num_seqs=3, max_batch_tokens=4, loads=LoadLimits(max_loads=2),
        prefix_cache=True,
    )  # fmt: skip
    system.runner.slow_copies.add("loading")
    system.images.on_disk.add("fetched")
    submit(system, "a", "loading")
    submit(system, "b", "fetched")
    submit(system, "c", "third")
    submit(system, "runs", None, 4, prompt=9)
    submit(system, "follows", None, 4, prompt=9)
    submit(system, "later", None, 4, prompt=1)
    submit(system, "last", None, 4, prompt=1)
    steps(system, 1)
    assert system.scheduler.waiting_by_reason() == {
        WaitReason.ADAPTER_LOAD: 1,
        WaitReason.ADAPTER_FETCH: 1,
        WaitReason.LOAD_LIMIT: 1,
        WaitReason.TOKEN_BUDGET: 3,
    }
    for _ in range(8):
        steps(system, 1)
        assert sum(system.scheduler.waiting_by_reason().values()) == system.scheduler.num_waiting
    system.images.finish_fetches()
    system.runner.finish_copies()
    run(system)
