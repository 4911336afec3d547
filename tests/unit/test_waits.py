"""What is told of single sequences: how each came to its seat, and why one still waits. A fake clock, no tensor."""

from __future__ import annotations

import pytest

from interleaf.core import AdapterFound, Event, Request, RequestWaiting, SamplingParams, SequenceStart, TokenEvent
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.sequence import WaitReason
from interleaf.stats import LOAD_BOUNDS_S
from tests.support.fake_engine import FakeSystem

LONG_S = 5.0


def submit(system: FakeSystem, name: str, adapter: str | None = None, tokens: int = 4, prompt: int = 3) -> None:
    request = Request(
        id=name,
        prompt_token_ids=tuple(range(1, 1 + prompt)),
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        adapter=adapter,  # type: ignore[arg-type]
        arrival_s=system.now_s,
    )
    system.engine.submit(request, frozenset(), seed=len(name))


def steps(system: FakeSystem, count: int, seconds: float = 0.0) -> list[Event]:
    """Some steps, each so many seconds after the one before."""
    events: list[Event] = []
    for _ in range(count):
        system.now_s += seconds
        events += system.engine.step()
    return events


def starts(events: list[Event]) -> dict[str, SequenceStart]:
    return {e.request_id: e.start for e in events if isinstance(e, TokenEvent) and e.start is not None}


def waits(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.request_id, event.reason) for event in events if isinstance(event, RequestWaiting)]


def test_a_first_token_tells_how_long_the_sequence_waited_and_no_other_token_does() -> None:
    system = FakeSystem(max_num_seqs=1)
    submit(system, "first", tokens=4)
    submit(system, "second", tokens=2)
    events = steps(system, 12, seconds=1.0)
    told = starts(events)
    assert told["first"] == SequenceStart(1.0, waits={"queued": 1.0})
    assert told["second"].queue_s == pytest.approx(1.0 + 5, abs=1), "four steps of the first, and one to see its end"
    assert sum(isinstance(event, TokenEvent) and event.start is not None for event in events) == 2


def test_a_sequence_that_was_preempted_tells_of_its_first_start_only() -> None:
    system = FakeSystem(num_pages=8, page_tokens=2, max_num_seqs=4, max_batch_tokens=8)
    for i in range(3):
        submit(system, f"r{i}", tokens=10)
    events = steps(system, 60, seconds=1.0)
    assert system.scheduler.num_preemptions > 0
    assert sum(isinstance(event, TokenEvent) and event.start is not None for event in events) == 3


def test_whoever_uses_a_load_first_tells_how_long_it_took_and_each_tells_how_the_adapter_was_found() -> None:
    system = FakeSystem({"a": 2}, max_num_seqs=4)
    system.images.on_disk.add("a")
    submit(system, "miss", "a")
    submit(system, "behind", "a")
    submit(system, "base")
    events = steps(system, 3, seconds=1.0)
    system.images.finish_fetches()
    events += steps(system, 8, seconds=1.0)
    submit(system, "hit", "a")
    told = starts(events + steps(system, 8, seconds=1.0))
    assert {name: start.found for name, start in told.items()} == {
        "miss": AdapterFound.MISS, "behind": AdapterFound.MISS, "base": None, "hit": AdapterFound.HIT,
    }  # fmt: skip
    assert {name for name, start in told.items() if start.load_s is not None} == {"miss"}
    load_s = told["miss"].load_s
    assert load_s is not None
    assert 3.0 <= load_s <= 5.0, "sent for at the first step, fetched after the third, copied with the fourth"
    counts = system.residency.counts
    assert counts.load_s == load_s
    assert counts.load_times[LOAD_BOUNDS_S.index(5)] == sum(counts.load_times) == counts.loads == 1


def test_the_prefix_that_was_found_is_told() -> None:
    system = FakeSystem(prefix_cache=True, page_tokens=4)
    submit(system, "first", prompt=10)
    events = steps(system, 8)
    submit(system, "second", prompt=10)
    told = starts(events + steps(system, 8))
    assert (told["first"].num_cached, told["second"].num_cached) == (0, 8)


def test_a_load_that_failed_or_was_called_off_is_not_among_the_times() -> None:
    system = FakeSystem({"a": 1, "b": 1}, loads=LoadLimits(timeout_s=2.0))
    system.images.on_disk.add("a")
    system.runner.broken_copies.add("b")
    submit(system, "hangs", "a")
    submit(system, "breaks", "b")
    steps(system, 6, seconds=1.0)
    assert not system.engine.has_work
    system.images.finish_fetches()
    submit(system, "again", "a")
    (start,) = starts(steps(system, 6, seconds=0.01)).values()
    assert start.load_s is not None
    assert start.load_s < 0.1, "counted from when it was sent for the first time"
    assert sum(system.residency.counts.load_times) == 1


def blocked(system: FakeSystem, reason: WaitReason) -> None:
    """Make "blocked" wait for a reason of its own."""
    match reason:
        case WaitReason.SEATS:
            submit(system, "runs", tokens=60)
            submit(system, "blocked")
        case WaitReason.PAGES:
            submit(system, "runs", tokens=60, prompt=40)
            submit(system, "blocked", prompt=100)
        case WaitReason.ADAPTER_FETCH:
            system.images.on_disk.add("a")
            submit(system, "blocked", "a")
        case WaitReason.ADAPTER_LOAD:
            system.runner.slow_copies.add("a")
            submit(system, "blocked", "a")
        case WaitReason.LOAD_LIMIT:
            system.images.on_disk.update("ab")
            submit(system, "runs", "a")
            submit(system, "blocked", "b")


@pytest.mark.parametrize(
    "reason",
    [WaitReason.SEATS, WaitReason.PAGES, WaitReason.ADAPTER_FETCH, WaitReason.ADAPTER_LOAD, WaitReason.LOAD_LIMIT],
    ids=lambda reason: reason.name,
)
def test_a_request_that_waits_for_long_is_told_of_once_with_the_reason(reason: WaitReason) -> None:
    seats = 1 if reason is WaitReason.SEATS else 4
    system = FakeSystem({"a": 1, "b": 1}, max_num_seqs=seats, loads=LoadLimits(max_loads=1))
    system.scheduler.tell_long_waits(LONG_S)
    blocked(system, reason)
    assert waits(steps(system, 4, seconds=1.0)) == []
    told = waits(steps(system, 6, seconds=1.0))
    assert ("blocked", reason.value) in told
    assert len(told) == len(set(told)), "told twice"
    assert waits(steps(system, 20, seconds=1.0)) == []


def test_nobody_is_told_of_who_runs_has_ended_or_was_not_asked_about() -> None:
    for asked in (True, False):
        system = FakeSystem(max_num_seqs=1)
        if asked:
            system.scheduler.tell_long_waits(LONG_S)
        submit(system, "runs", tokens=40)
        submit(system, "leaves")
        steps(system, 2, seconds=1.0)
        if asked:
            system.engine.abort("leaves")
        assert waits(steps(system, 20, seconds=1.0)) == []
