"""Allocator, prefix cache, residency, eviction, swap space, scheduler and step loop together under random arrivals,
loads, faults, aborts and preemptions.

Every answer is compared with the model run alone; every request must end exactly once; pages must always balance; and
whatever was done must give the same plans when it is done again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from interleaf.adapters.residency import AdapterState
from interleaf.core import (
    AdapterUid,
    Request,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokenEvent,
)
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.eviction import CostAware, Lru, PageCosts
from interleaf.scheduler.admission import Conservative, Estimated, Optimistic
from interleaf.scheduler.loads import LoadLimits
from tests.support.fake_engine import EOS, FakeSystem, expected_tokens

ADAPTERS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8}
MAX_MODEL_LEN = 32
ADMISSIONS = {"optimistic": Optimistic, "estimated": lambda: Estimated(prior=4), "conservative": Conservative}
COSTS = PageCosts(adapter_s=1.0, prefix_s=3.0)
"""To swap a page costs 2: more than to compute half a page."""
EVICTIONS = {"lru": lambda: Lru(COSTS), "cost": lambda: CostAware(COSTS, half_life=5.0)}
BEGINNINGS = [(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 5, 4, 3), (1, 2, 5, 5)]


class ServingMachine(RuleBasedStateMachine):
    """What clients, the host tier, the copies and the step loop can do, in any order."""

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4]),
        spare_pages=st.sampled_from([0, 0, 3, 12]),
        seats=st.integers(1, 5),
        budget=st.integers(5, 20),
        lookahead=st.integers(0, 1),
        refill=st.integers(1, 3),
        max_loads=st.integers(1, 4),
        prefetch=st.integers(0, 3),
        admission=st.sampled_from([*sorted(ADMISSIONS), "optimistic"]),
        eviction=st.sampled_from(sorted(EVICTIONS)),
        prefix_cache=st.booleans(),
        swap_slots=st.sampled_from([0, 1, 3, 30]),
        early=st.sampled_from(["", "ac", "".join(ADAPTERS)]),
    )
    def start(
        self, page_tokens: int, spare_pages: int, seats: int, budget: int, lookahead: int, refill: int, max_loads: int,
        prefetch: int, admission: str, eviction: str, prefix_cache: bool, swap_slots: int, early: str,
    ) -> None:  # fmt: skip
        # The engine's own promise at start: the largest adapter and the longest sequence fit together.
        num_pages = max(ADAPTERS.values()) + -(-MAX_MODEL_LEN // page_tokens) + spare_pages
        self.admission = admission
        self.make_system = lambda: FakeSystem(
            dict(ADAPTERS), num_pages, page_tokens, budget, seats, lookahead, min(refill, seats),
            loads=LoadLimits(max_loads, prefetch), admission=ADMISSIONS[admission](), eviction=EVICTIONS[eviction](),
            prefix_cache=prefix_cache, swap_slots=swap_slots, early_copies=frozenset(early),
        )  # fmt: skip
        self.system = self.make_system()
        self.script: list[Callable[[FakeSystem], object]] = []
        self.requests: dict[str, tuple[Request, int, bool]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[str, list[object]] = defaultdict(list)
        self.aborted: set[str] = set()
        self.cut: set[tuple[str, int]] = set()
        self.broken: set[str] = set()

    def do(self, what: Callable[[FakeSystem], object]) -> None:
        """Everything that changes the system goes through here, so that it can be done again."""
        self.script.append(what)
        what(self.system)

    @rule(
        adapter=st.sampled_from([None, *ADAPTERS]),
        beginning=st.sampled_from(BEGINNINGS),
        prompt=st.lists(st.integers(1, 5), min_size=1, max_size=8),
        max_tokens=st.sampled_from([1, 2, 4, 8, 16]),
        n=st.sampled_from([1, 1, 1, 2]),
        stops=st.booleans(),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def submit(
        self, adapter: str | None, beginning: tuple[int, ...], prompt: list[int], max_tokens: int, n: int, stops: bool,
        salt: str | None,
    ) -> None:  # fmt: skip
        number = len(self.requests)
        uid = None if adapter is None else AdapterUid(adapter)
        params = SamplingParams(n=n, max_tokens=max_tokens)
        request = Request(
            id=f"r{number}", prompt_token_ids=(*beginning, *prompt), params=params, adapter=uid, cache_salt=salt
        )
        self.requests[request.id] = (request, 1000 * number, stops)
        stop_ids = frozenset({EOS}) if stops else frozenset()
        self.do(lambda system: system.engine.submit(request, stop_ids, 1000 * number))

    @rule(
        count=st.integers(3, 6), beginning=st.sampled_from(BEGINNINGS), steps=st.integers(6, 16),
        adapter=st.sampled_from([None, None, *ADAPTERS]),
    )  # fmt: skip
    def submit_a_crowd(self, count: int, beginning: tuple[int, ...], steps: int, adapter: str | None) -> None:
        """Short prompts and long answers, all at once: whoever admits them all has to preempt some."""
        for number in range(count):
            self.submit(adapter, beginning, [1 + number % 2], 16, 1, number % 3 == 0, None)
        self.step(steps)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.advance()

    def advance(self) -> None:
        self.script.append(lambda system: system.engine.step())
        self.take(self.system.engine.step())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(id_)
        self.do(lambda system: system.engine.abort(id_))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end_one_sequence(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.requests)))
        self.cut.add((id_, 0))
        self.do(lambda system: system.engine.abort(id_, 0))

    @rule(adapter=st.sampled_from([*ADAPTERS]))
    def drop_from_host_memory(self, adapter: str) -> None:
        if not self.system.images.pins.get(adapter):
            self.do(lambda system: system.images.on_disk.add(adapter))

    @rule()
    def finish_fetches(self) -> None:
        self.do(lambda system: system.images.finish_fetches())

    @rule(adapter=st.sampled_from([*ADAPTERS]), is_slow=st.booleans())
    def change_speed(self, adapter: str, is_slow: bool) -> None:
        change = set.add if is_slow else set.discard
        self.do(lambda system: change(system.runner.slow_copies, adapter))

    @rule()
    def finish_copies(self) -> None:
        self.do(lambda system: system.runner.finish_copies())

    @rule(adapter=st.sampled_from([*ADAPTERS]), how=st.sampled_from(["fetch", "copy", "mend"]))
    def break_or_mend(self, adapter: str, how: str) -> None:
        def change(system: FakeSystem) -> None:
            if how == "fetch":
                system.images.failed[adapter] = "unreadable"
            elif how == "copy":
                system.runner.broken_copies.add(adapter)
            else:
                system.images.failed.pop(adapter, None)
                system.runner.broken_copies.discard(adapter)

        self.do(change)
        if how != "mend":
            self.broken.add(adapter)

    @rule(adapter=st.sampled_from([*ADAPTERS]))
    def withdraw(self, adapter: str) -> None:
        """As the registry does: only what no open request refers to."""
        open_ = [r for r, _, _ in self.requests.values() if r.id not in self.ends and r.adapter == adapter]
        if not open_:
            self.do(lambda system: system.scheduler.forget_adapter(AdapterUid(adapter)))

    def take(self, events: list[object]) -> None:
        for event in events:
            assert event.request_id not in self.ends, f"{event} after the end"
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id, event.index].append(event.token_id)
            else:
                self.ends[event.request_id].append(event)

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "system"):
            return
        system = self.system
        system.allocator.check()
        system.prefixes.check()
        system.residency.check()
        assert system.scheduler.num_running <= system.max_num_seqs
        assert len(system.prefixes) == system.allocator.num_used_pages(OwnerKind.PREFIX)
        used = sum(system.allocator.num_used_pages(kind) for kind in OwnerKind)
        assert used + system.allocator.num_free_pages == system.num_pages
        for name in ADAPTERS:
            uid = AdapterUid(name)
            pages = system.residency.pages(uid)
            assert len(pages) == (0 if system.residency.state(uid) is AdapterState.COLD else ADAPTERS[name])
            assert all(system.allocator.owner(page).key == name for page in pages)
        self.kept_and_swapped_pages_balance()
        waiting = system.scheduler.waiting_by_reason()
        assert all(count > 0 for count in waiting.values())

    def kept_and_swapped_pages_balance(self) -> None:
        """Every page of KV and every slot on the host is that of one open sequence, which knows it."""
        system = self.system
        system.swap.check()
        num_pages = num_slots = 0
        for seq in (seq for entry in system.scheduler._open.values() for seq in entry.sequences):
            num_pages += len(seq.pages) - len(seq.prefix)
            assert seq.is_seated or not seq.pages
            if seq.kept is not None:
                assert seq.is_waiting
                seq.kept.check()
                num_pages += seq.kept.num_pages
                num_slots += seq.kept.num_slots
        assert num_pages == system.allocator.num_used_pages(OwnerKind.KV)
        assert num_slots == system.swap.num_used_slots

    @invariant()
    def what_runs_is_in_the_pool(self) -> None:
        """Asked of the runner, which holds what it was told: nothing pinned has been evicted."""
        if not hasattr(self, "system"):
            return
        for seat in self.system.runner.seats.values():
            uid = seat.start.adapter
            if uid is not None and seat.start.seat not in self.vacated():
                assert self.system.residency.state(uid) is AdapterState.RESIDENT

    def vacated(self) -> set[int]:
        """Seats that the runner will learn of with plans that it has not executed, or that are not made yet."""
        seats = self.system.scheduler._seats
        taken = {seq.seat for seq in seats}
        planned = {seat for handle in self.system.runner.launched for seat in handle.plan.vacate}
        return planned | (set(range(self.system.max_num_seqs)) - taken) | set(seats._vacated)

    def teardown(self) -> None:
        if not hasattr(self, "system"):
            return
        system = self.system
        for _ in range(5000):
            if not system.engine.has_work:
                break
            self.advance()
            self.do(lambda system: (system.images.finish_fetches(), system.runner.finish_copies()))
        self.advance()
        assert not system.engine.has_work, system.scheduler.waiting_by_reason()
        assert system.allocator.num_used_pages(OwnerKind.KV) == 0
        assert system.swap.num_used_slots == 0
        assert system.prefixes.num_used_pages == 0
        assert system.residency.num_busy_pages == sum(ADAPTERS[uid] for uid in system.runner.copying)
        assert not any(count for uid, count in system.images.pins.items() if uid not in system.runner.copying)
        if self.admission == "conservative":
            assert system.scheduler.num_preemptions == 0
        for id_, (request, seed, stops) in self.requests.items():
            (end,) = self.ends[id_]
            allowed = [RequestFinished(id_)]
            if id_ in self.aborted:
                allowed.append(RequestAborted(id_))
            if request.adapter in self.broken:
                allowed += [RequestFailed(id_, "unreadable"), RequestFailed(id_, "the copy broke")]
            assert end in allowed
            for index in range(request.params.n):
                right = expected_tokens(
                    request.adapter, seed + index, request.prompt_token_ids, request.params.max_tokens,
                    ignore_eos=not stops,
                )  # fmt: skip
                got = self.tokens[id_, index]
                assert got == right[: len(got)]
                if end == RequestFinished(id_) and (id_, index) not in self.cut:
                    assert got == right
        for plan in system.runner.plans:
            assert plan.num_tokens <= system.max_batch_tokens
        again = self.make_system()
        for what in self.script:
            what(again)
        assert again.runner.plans == system.runner.plans


def check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        ServingMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_traffic_keeps_every_invariant() -> None:
    check(examples=60, steps=40)


@pytest.mark.long
def test_random_traffic_keeps_every_invariant_for_long() -> None:
    check(examples=1000, steps=100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_one_system_keeps_every_invariant_for_ten_thousand_steps(seed: int) -> None:
    """Hypothesis begins anew every hundred rules or so; what wears out slowly shows only here."""
    rng = random.Random(seed)
    machine = ServingMachine()
    machine.start(
        page_tokens=rng.choice([1, 2, 4]), spare_pages=rng.randint(0, 12), seats=rng.randint(2, 5),
        budget=rng.randint(5, 20), lookahead=seed % 2, refill=rng.randint(1, 2), max_loads=rng.randint(1, 4),
        prefetch=rng.randint(0, 3), admission=[*sorted(ADMISSIONS), "optimistic"][seed],
        eviction=sorted(EVICTIONS)[seed % 2], prefix_cache=seed < 3, swap_slots=(0, 5, 100, 20)[seed],
        early=("", "ac", "bde", "abcde")[seed],
    )  # fmt: skip
    one_of = SimpleNamespace(draw=lambda strategy: rng.choice(sorted(machine.requests)))
    adapters = sorted(ADAPTERS)
    rules: list[Callable[[], object]] = [
        lambda: machine.submit(
            rng.choice([None, *adapters]), rng.choice(BEGINNINGS), rng.choices(range(1, 6), k=rng.randint(1, 8)),
            rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 1, 2]), rng.random() < 0.5, rng.choice([None, None, "tenant"]),
        ),
        lambda: machine.submit_a_crowd(
            rng.randint(3, 6), rng.choice(BEGINNINGS), rng.randint(6, 16), rng.choice([None, *adapters])
        ),
        lambda: machine.requests and machine.abort(one_of),
        lambda: machine.requests and machine.end_one_sequence(one_of),
        lambda: machine.drop_from_host_memory(rng.choice(adapters)),
        machine.finish_fetches,
        lambda: machine.change_speed(rng.choice(adapters), rng.random() < 0.5),
        machine.finish_copies,
        lambda: machine.break_or_mend(rng.choice(adapters), rng.choice(["fetch", "copy", "mend", "mend", "mend"])),
        lambda: machine.withdraw(rng.choice(adapters)),
    ]  # fmt: skip
    for _ in range(10_000):
        rng.choices(rules, weights=[5, 0.2, 1, 1, 1, 2, 1, 2, 1, 1])[0]()
        machine.step(rng.randint(1, 3))
        machine.pages_balance()
        machine.what_runs_is_in_the_pool()
    assert len(machine.system.runner.plans) >= 10_000
    assert machine.admission != "optimistic" or machine.system.swap.counts.in_pages > 100
    machine.teardown()
