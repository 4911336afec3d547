"""How long each sequence has waited for what, beside an account that looks at every one of them after every plan."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interleaf.core import AdapterUid, Event, Request, RequestFailed, RequestWaits, SamplingParams, TokenEvent
from interleaf.core.events import RequestAborted, RequestFinished, RequestWaiting, SequenceStart
from interleaf.memory.eviction import CostAware, Lru
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.sequence import Sequence, SequenceState, WaitReason
from interleaf.scheduler.standing import Standing
from tests.support.fake_engine import FakeSystem

MOMENT_S = 0.125
"""Times are multiples of it: sums of floats are exact then."""
ADAPTERS = {"a": 1, "b": 1, "c": 2, "d": 3}
Times = dict[str, float]


@dataclass
class Account:
    """The seconds of one sequence, in plain sums."""

    first: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    since_s: float = 0.0
    reason: str = WaitReason.QUEUED.value
    has_started: bool = False
    is_told: bool = False

    def waited_until(self, now_s: float) -> None:
        (self.again if self.has_started else self.first)[self.reason] += now_s - self.since_s  # type: ignore[assignment]
        self.since_s = now_s


class Bookkeeper:
    """Looks at all sequences after every plan: what each waits for then is what it has waited for until the next."""

    def __init__(self, system: FakeSystem) -> None:
        self.system = system
        self.open: dict[str, list[Sequence]] = {}
        self.accounts: dict[tuple[str, int], Account] = {}
        self.waiting: set[tuple[str, int]] = set()
        self.starts: dict[tuple[str, int], SequenceStart] = {}
        self.ends: dict[str, RequestWaits] = {}
        self.expected_ends: dict[str, RequestWaits] = {}
        self.seen: Counter[str] = Counter()
        plan = system.scheduler.plan

        def observed(now_s: float = 0.0) -> object:
            made = plan(now_s)
            self.look(now_s)
            return made

        system.scheduler.plan = observed  # type: ignore[method-assign, assignment]

    def submit(self, name: str, adapter: str | None, n: int, prompt: tuple[int, ...], tokens: int) -> None:
        uid = None if adapter is None else AdapterUid(adapter)
        params = SamplingParams(max_tokens=tokens, n=n)
        now_s = self.system.now_s
        request = Request(id=name, prompt_token_ids=prompt, params=params, adapter=uid, arrival_s=now_s)
        self.system.engine.submit(request, frozenset({0}), seed=len(name) + tokens)
        self.open[name] = list(self.system.scheduler._open[name].sequences)
        for index in range(n):
            self.accounts[name, index] = Account(since_s=now_s)
            self.waiting.add((name, index))

    def look(self, now_s: float) -> None:
        """After a plan."""
        for name, sequences in self.open.items():
            for seq in sequences:
                key, account = (name, seq.index), self.accounts[name, seq.index]
                waits = seq.state is SequenceState.WAITING
                if key in self.waiting:
                    account.waited_until(now_s)
                else:
                    account.since_s = now_s
                if seq.start is not None:
                    account.has_started = True
                self.waiting.discard(key)
                if waits:
                    self.waiting.add(key)
                    account.reason = self.system.scheduler._entrance.reason(seq).value
                    standing = self.system.scheduler._entrance._waiting.standing(seq.adapter)
                    assert standing is not None
                    assert (account.reason == WaitReason.ADAPTER_LOAD.value) == (standing is Standing.LOADING)
                    is_fetched = standing in (Standing.FETCHING, Standing.ASKED)
                    assert (account.reason == WaitReason.ADAPTER_FETCH.value) == is_fetched
                    self.seen[account.reason] += 1
        self.check_counts()

    def check_counts(self) -> None:
        expected = Counter(self.accounts[key].reason for key in self.waiting)
        counted = self.system.scheduler.waiting_by_reason()
        assert {reason.value: count for reason, count in counted.items()} == expected

    def take(self, events: list[Event]) -> None:
        """Keep what was told, and when a request has ended what should have been."""
        for event in events:
            if isinstance(event, TokenEvent):
                if event.start is not None:
                    assert (event.request_id, event.index) not in self.starts
                    self.starts[event.request_id, event.index] = event.start
                    self.accounts[event.request_id, event.index].is_told = True
            elif isinstance(event, RequestFinished | RequestAborted | RequestFailed):
                self.ends[event.request_id] = event.waits or RequestWaits()

    def look_for_ends(self, now_s: float) -> None:
        """After whatever ends sequences."""
        for name, index in sorted(self.waiting):
            if self.open[name][index].state is SequenceState.ENDED:
                self.accounts[name, index].waited_until(now_s)
                self.waiting.discard((name, index))


def nonzero(times: Counter[str]) -> Times:
    return {reason: seconds for reason, seconds in times.items() if seconds}


def run(seed: int) -> Bookkeeper:
    """Some steps of random traffic, loads, faults and ends, then as many as it takes until all is over."""
    rng = random.Random(seed)
    system = FakeSystem(
        dict(ADAPTERS), num_pages=rng.randint(12, 24), page_tokens=2, max_batch_tokens=rng.randint(5, 10),
        max_num_seqs=rng.randint(1, 4), lookahead=rng.randint(0, 1), refill_seats=1,
        loads=LoadLimits(rng.randint(1, 3), rng.randint(0, 2), rng.choice([None, 3.0])),
        eviction=rng.choice([Lru(), CostAware()]), prefix_cache=rng.random() < 0.5,
    )  # fmt: skip
    system.scheduler.tell_long_waits(2.0)
    book = Bookkeeper(system)
    names: list[str] = []
    for step in range(1000):
        is_traffic = step < 25
        if not is_traffic and not system.engine.has_work:
            break
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5]) if is_traffic else 0):
            names.append(f"r{len(names)}")
            prompt = (1, 2, 3, 4, 5)[: rng.randint(1, 5)] + tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 2)))
            book.submit(names[-1], rng.choice([None, *ADAPTERS]), rng.choice([1, 1, 1, 2]), prompt, rng.randint(1, 8))
            system.now_s += MOMENT_S * rng.randint(0, 2)
        if is_traffic:
            system.images.on_disk.update(rng.sample(sorted(ADAPTERS), rng.randint(0, 1)))
            system.runner.slow_copies = set(rng.sample(sorted(ADAPTERS), rng.randint(0, 2)))
            system.runner.broken_copies = set(rng.sample(sorted(ADAPTERS), rng.random() < 0.1))
        else:
            system.runner.slow_copies, system.runner.broken_copies = set(), set()
        if not is_traffic or rng.random() < 0.4:
            system.images.finish_fetches()
            system.runner.finish_copies()
        system.now_s += MOMENT_S * rng.randint(0, 6)
        if names and rng.random() < 0.2:
            name = rng.choice(names)
            system.engine.abort(name, rng.choice([None, 0, 1]))
            book.look_for_ends(system.now_s)
        system.now_s += MOMENT_S * rng.randint(0, 6)
        book.take(system.engine.step())
        book.look_for_ends(system.now_s)
    assert not system.engine.has_work
    return book


def check(book: Bookkeeper) -> None:
    """What was told, against what was seen."""
    for name, sequences in book.open.items():
        first: Counter[str] = Counter()
        again: Counter[str] = Counter()
        for seq in sequences:
            account = book.accounts[name, seq.index]
            start = book.starts.get((name, seq.index))
            assert (start is not None) == account.is_told
            if start is None:
                first.update(account.first)
            else:
                assert start.waits == nonzero(account.first), (name, seq.index)
                assert start.queue_s == sum(start.waits.values())
            again.update(account.again)
        told = book.ends[name]
        assert told.first == nonzero(first), name
        assert told.again == nonzero(again), name


@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 2**32))
def test_what_is_told_is_what_was_seen_after_every_plan(seed: int) -> None:
    check(run(seed))


def test_random_traffic_waits_for_everything_and_in_every_way() -> None:
    seen: Counter[str] = Counter()
    ways: dict[str, int] = defaultdict(int)
    for seed in range(30):
        book = run(seed)
        seen += book.seen
        ways["told at the start"] += any(start.waits for start in book.starts.values())
        ways["told at the end"] += any(told.first for told in book.ends.values())
        ways["after a preemption"] += any(told.again for told in book.ends.values())
    assert set(seen) >= {reason.value for reason in WaitReason} - {WaitReason.QUEUED.value}
    assert all(ways.values()), dict(ways)


def test_a_long_wait_is_told_with_its_parts() -> None:
    system = FakeSystem({"a": 1}, max_num_seqs=1, loads=LoadLimits(max_loads=1))
    system.scheduler.tell_long_waits(5.0)
    system.images.on_disk.add("a")
    book = Bookkeeper(system)
    book.submit("waits", "a", 1, (1, 2), 2)
    told = []
    for _ in range(9):
        system.now_s += 1.0
        told += [event for event in system.engine.step() if isinstance(event, RequestWaiting)]
    assert told == [
        RequestWaiting("waits", 5.0, WaitReason.ADAPTER_FETCH.value, {"queued": 1.0, "adapter is read from disk": 4.0})
    ]


def test_an_abort_is_as_late_as_it_comes_not_as_the_last_plan() -> None:
    system = FakeSystem(max_num_seqs=1)
    book = Bookkeeper(system)
    book.submit("runs", None, 1, (1, 2), 40)
    book.submit("waits", None, 1, (1, 2), 40)
    for _ in range(3):
        system.now_s += 1.0
        book.take(system.engine.step())
    system.now_s += 100.0
    system.engine.abort("waits")
    system.now_s += 1000.0
    book.take(system.engine.step())
    assert book.ends["waits"] == RequestWaits({"queued": 1.0, "seats": 102.0})


def test_whoever_comes_and_goes_between_two_plans_has_waited_for_the_next() -> None:
    system = FakeSystem()
    book = Bookkeeper(system)
    book.submit("brief", None, 2, (1, 2), 4)
    system.now_s += 0.5
    system.engine.abort("brief", 1)
    system.now_s += 0.25
    system.engine.abort("brief", 0)
    book.take(system.engine.step())
    assert book.ends["brief"] == RequestWaits({"queued": 1.25})


@pytest.mark.parametrize("count", [10, 1000])
def test_a_plan_reads_no_line_that_nothing_happened_to(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from interleaf.scheduler import wait_times

    system = FakeSystem({f"a{i}": 1 for i in range(count)}, max_num_seqs=1, loads=LoadLimits(max_loads=2))
    system.images.on_disk.update(system.images.pages)
    for i in range(count):
        params, uid = SamplingParams(max_tokens=2), AdapterUid(f"a{i}")
        request = Request(id=f"r{i}", prompt_token_ids=(1,), params=params, adapter=uid, arrival_s=0.0)
        system.engine.submit(request, frozenset(), seed=i)
    system.engine.step()
    readings = 0
    read = wait_times._Line.reading

    def counted(line: wait_times._Line) -> list[int]:
        nonlocal readings
        readings += 1
        return read(line)

    monkeypatch.setattr(wait_times._Line, "reading", counted)
    monkeypatch.setattr(wait_times._Line, "settle", lambda line: pytest.fail("a line was settled"))
    for _ in range(50):
        system.now_s += 1.0
        system.engine.step()
    assert not readings
