"""Allocator, residency, scheduler and step loop together under random arrivals, loads, faults, aborts and preemptions.

Every answer is compared with the model run alone; every request must end exactly once; pages must always balance.
"""

from __future__ import annotations

from collections import Counter, defaultdict

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
from tests.support.fake_engine import EOS, FakeSystem, expected_tokens

ADAPTERS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8}
MAX_MODEL_LEN = 24


class ServingMachine(RuleBasedStateMachine):
    """What clients, the host tier and the step loop can do, in any order."""

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4]),
        spare_pages=st.integers(0, 12),
        seats=st.integers(1, 5),
        budget=st.integers(5, 20),
        lookahead=st.integers(0, 1),
    )
    def start(self, page_tokens: int, spare_pages: int, seats: int, budget: int, lookahead: int) -> None:
        # The engine's own promise at start: the largest adapter and the longest sequence fit together.
        num_pages = max(ADAPTERS.values()) + -(-MAX_MODEL_LEN // page_tokens) + spare_pages
        self.system = FakeSystem(dict(ADAPTERS), num_pages, page_tokens, budget, seats, lookahead)
        self.requests: dict[str, tuple[Request, int, bool]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[str, list[object]] = defaultdict(list)
        self.aborted: set[str] = set()
        self.cut: set[tuple[str, int]] = set()
        self.broken: set[str] = set()

    @rule(
        adapter=st.sampled_from([None, *ADAPTERS]),
        prompt=st.lists(st.integers(1, 5), min_size=1, max_size=12),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2]),
        stops=st.booleans(),
    )
    def submit(self, adapter: str | None, prompt: list[int], max_tokens: int, n: int, stops: bool) -> None:
        number = len(self.requests)
        uid = None if adapter is None else AdapterUid(adapter)
        params = SamplingParams(n=n, max_tokens=max_tokens)
        request = Request(id=f"r{number}", prompt_token_ids=tuple(prompt), params=params, adapter=uid)
        self.requests[request.id] = (request, 10 * number, stops)
        self.system.engine.submit(request, frozenset({EOS} if stops else ()), seed=10 * number)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.system.engine.step())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(id_)
        self.system.engine.abort(id_)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end_one_sequence(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.requests)))
        self.cut.add((id_, 0))
        self.system.engine.abort(id_, 0)

    @rule(adapter=st.sampled_from([*ADAPTERS]))
    def drop_from_host_memory(self, adapter: str) -> None:
        if not self.system.images.pins.get(adapter):
            self.system.images.on_disk.add(adapter)

    @rule()
    def finish_fetches(self) -> None:
        self.system.images.finish_fetches()

    @rule(adapter=st.sampled_from([*ADAPTERS]), how=st.sampled_from(["fetch", "copy", "mend"]))
    def break_or_mend(self, adapter: str, how: str) -> None:
        images, runner = self.system.images, self.system.runner
        if how == "fetch":
            images.failed[adapter] = "unreadable"
        elif how == "copy":
            runner.broken_copies.add(adapter)
        else:
            images.failed.pop(adapter, None)
            runner.broken_copies.discard(adapter)
        if how != "mend":
            self.broken.add(adapter)

    @rule(adapter=st.sampled_from([*ADAPTERS]))
    def withdraw(self, adapter: str) -> None:
        """As the registry does: only what no open request refers to."""
        open_ = [r for r, _, _ in self.requests.values() if r.id not in self.ends and r.adapter == adapter]
        if not open_:
            self.system.residency.remove(AdapterUid(adapter))

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
        assert system.scheduler.num_running <= system.max_num_seqs
        used = Counter(system.allocator.owner(page) for page in range(system.num_pages))
        for name in ADAPTERS:
            uid = AdapterUid(name)
            pages = system.residency.pages(uid)
            assert len(pages) == (0 if system.residency.state(uid) is AdapterState.COLD else ADAPTERS[name])
            assert all(system.allocator.owner(page).key == name for page in pages)
        assert sum(used.values()) == system.num_pages

    def teardown(self) -> None:
        if not hasattr(self, "system"):
            return
        system = self.system
        for _ in range(5000):
            if not system.engine.has_work:
                break
            self.take(system.engine.step())
            system.images.finish_fetches()
        self.take(system.engine.step())
        assert not system.engine.has_work, system.scheduler.waiting_by_reason()
        assert system.allocator.num_used_pages(OwnerKind.KV) == 0
        assert not any(system.images.pins.values())
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
    check(examples=1500, steps=100)
