"""A pool that is split: neither side takes a page of the other, and everything else holds as in a shared one."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test
from typer.testing import CliRunner

from interleaf.config import EngineConfig
from interleaf.core import AdapterUid, Event, Request, RequestFailed, RequestFinished, SamplingParams
from interleaf.errors import ConfigError
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.regions import Regions
from interleaf.scheduler.loads import LoadLimits
from interleaf.sim.cli import app
from tests.support.fake_engine import FakeSystem
from tests.unit.test_state_machine import ADAPTERS, ADMISSIONS, EVICTIONS, MAX_MODEL_LEN, ServingMachine


def submit(system: FakeSystem, id_: str, adapter: str | None = None, max_tokens: int = 6, prompt: int = 2) -> None:
    uid = None if adapter is None else AdapterUid(adapter)
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(id=id_, prompt_token_ids=tuple(range(1, 1 + prompt)), params=params, adapter=uid)
    system.engine.submit(request, frozenset(), seed=1)


def run(system: FakeSystem, limit: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(limit):
        if not system.engine.has_work:
            break
        events += system.engine.step()
        system.allocator.check()
    assert not system.engine.has_work, system.scheduler.waiting_by_reason()
    return events


def test_idle_adapters_stay_though_sequences_want_pages() -> None:
    """20 pages, 8 of them for adapters: of 16 that two long sequences would take there are 12."""
    for split, evictions, preemptions in ((None, 1, 0), (0.4, 0, 1)):
        system = FakeSystem({"a": 8}, num_pages=20, memory_split=split)
        submit(system, "first", "a", 1)
        run(system)
        for i in range(2):
            submit(system, f"long{i}", None, max_tokens=28, prompt=2)
        ends = run(system)
        assert ends.count(RequestFinished("long0")) == ends.count(RequestFinished("long1")) == 1
        assert (system.residency.counts.evictions, system.scheduler.num_preemptions) == (evictions, preemptions)


def test_cached_prefixes_stay_though_adapters_want_pages() -> None:
    """Three adapters of 5 pages, one at a time. They find room beside the cache, or in the place of it."""
    for split, cached in ((None, 0), (0.5, 2)):
        system = FakeSystem(dict.fromkeys("abc", 5), num_pages=10, prefix_cache=True, memory_split=split)
        submit(system, "prompt", None, max_tokens=1, prompt=9)
        run(system)
        assert system.allocator.num_used_pages(OwnerKind.PREFIX) == 2
        for adapter in "abc":
            submit(system, adapter, adapter, 1)
            run(system)
        assert system.allocator.num_used_pages(OwnerKind.PREFIX) == cached
        assert system.residency.counts.evictions == 2


def test_an_adapter_may_fill_its_share_and_no_more() -> None:
    system = FakeSystem({"fits": 4, "larger": 5}, num_pages=10, memory_split=0.4)
    submit(system, "a", "fits", 3)
    submit(system, "b", "larger", 3)
    ends = run(system)
    assert RequestFinished("a") in ends
    (failed,) = [event for event in ends if isinstance(event, RequestFailed)]
    assert failed.request_id == "b"
    assert "takes 5 pages, and 4 at most can be had" in failed.reason


def test_an_adapter_is_sent_for_ahead_of_need_whatever_sequences_may_want() -> None:
    """One seat, taken; the pool of sequences is full but for one page. Nothing of it is at stake."""
    system = FakeSystem(
        {"next": 4}, num_pages=10, max_num_seqs=1, loads=LoadLimits(4, prefetch_loads=1), memory_split=0.4
    )
    submit(system, "long", None, max_tokens=20, prompt=2)
    submit(system, "waits", "next", 1)
    for _ in range(6):
        system.engine.step()
    assert system.residency.counts.prefetches == 1
    run(system)


class SplitMachine(ServingMachine):
    """The random traffic of a shared pool."""

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4]),
        spare=st.tuples(st.integers(0, 6), st.integers(0, 6)),
        seats=st.integers(2, 5),
        lookahead=st.integers(0, 1),
        prefetch=st.integers(0, 3),
        admission=st.sampled_from(sorted(ADMISSIONS)),
        eviction=st.sampled_from(sorted(EVICTIONS)),
        prefix_cache=st.booleans(),
        swap_slots=st.sampled_from([0, 3, 30]),
    )
    def start(  # type: ignore[override]
        self, page_tokens: int, spare: tuple[int, int], seats: int, lookahead: int, prefetch: int, admission: str,
        eviction: str, prefix_cache: bool, swap_slots: int,
    ) -> None:  # fmt: skip
        # The promise at start: each share holds the largest thing that may want it.
        for_adapters = max(ADAPTERS.values()) + spare[0]
        num_pages = for_adapters + -(-MAX_MODEL_LEN // page_tokens) + spare[1]
        split = for_adapters / num_pages
        super().start(
            page_tokens=page_tokens, spare_pages=0, seats=seats, budget=12, lookahead=lookahead, refill=1, max_loads=3,
            prefetch=prefetch, admission=admission, eviction=eviction, prefix_cache=prefix_cache, swap_slots=swap_slots,
            early="",
        )  # fmt: skip
        self.make_system = lambda: FakeSystem(
            dict(ADAPTERS), num_pages, page_tokens, 12, seats, lookahead, loads=LoadLimits(3, prefetch),
            admission=ADMISSIONS[admission](), eviction=EVICTIONS[eviction](), prefix_cache=prefix_cache,
            swap_slots=swap_slots, memory_split=split,
        )  # fmt: skip
        self.system = self.make_system()

    @invariant()
    def nobody_is_in_the_others_share(self) -> None:
        if not hasattr(self, "system"):
            return
        regions = self.system.allocator
        assert isinstance(regions, Regions)
        assert regions.sequences.num_used_pages(OwnerKind.ADAPTER) == 0
        assert regions.adapters.num_used_pages(OwnerKind.KV) == 0
        assert regions.adapters.num_used_pages(OwnerKind.PREFIX) == 0


def check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SplitMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_traffic_keeps_every_invariant() -> None:
    check(examples=20, steps=30)


@pytest.mark.long
def test_random_traffic_keeps_every_invariant_for_long() -> None:
    check(examples=500, steps=100)


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, -0.5, "half", True])
def test_a_share_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="memory_split must be a share between 0 and 1"):
        EngineConfig(memory_split=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.3, "0.3"])
def test_a_share_may_be_text(value: object) -> None:
    assert EngineConfig(memory_split=value).memory_split == 0.3  # type: ignore[arg-type]


# ---------------------------------------------------------------- simulated


def simulated(*options: str) -> tuple[int, str]:
    """Returns: exit code, output."""
    words = "--requests 60 --num-adapters 30 --arrivals poisson:30 --popularity uniform --warm-up 0 --json"
    lengths = "--prompt fixed:64 --output fixed:16"
    result = CliRunner().invoke(app, ["run", *words.split(), *lengths.split(), *options])
    return result.exit_code, result.output


def test_a_simulated_share_that_is_too_small_for_all_adapters_loads_them_again() -> None:
    """2,000 pages and 30 adapters of 40: all fit in six tenths of them, 15 do in three tenths."""
    pool = ["--pool", str(2000 * 2**21)]
    reloads = [
        json.loads(simulated(*pool, *split)[1])["reloads"]
        for split in ((), ("--memory-split", "0.6"), ("--memory-split", "0.3"))
    ]
    assert reloads[:2] == [0, 0]
    assert reloads[2] > 0


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("0.01", "the largest adapter needs 40 pages and its share of the pool has 5"),
        ("0.999", "a sequence of 80 tokens needs 5 pages and its share of the pool has 0"),
        ("1.5", "memory_split must be a share between 0 and 1"),
    ],
)
def test_a_simulated_share_that_cannot_serve_is_refused(split: str, message: str) -> None:
    exit_code, output = simulated("--pool", str(500 * 2**21), "--memory-split", split)
    assert exit_code != 0
    assert message in output
