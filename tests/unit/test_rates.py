"""Rates are those of the runner's own copies and steps, or those that were set; the runner is as new after that."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
import torch

from interleaf.adapters.copy import LoadReport
from interleaf.adapters.image import AdapterImage
from interleaf.config import EngineConfig
from interleaf.core import AdapterUid, ModelSpec, StepPlan, StepResult, StreamOrder
from interleaf.engine.rates import ProbedImages, RateProbe, find_rates, nominal_rates, probe_image
from interleaf.errors import AdapterLoadFailed, ConfigError, InterleafError
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.peft_folders import MODEL, NUM_LAYERS

SPEC = ModelSpec(**MODEL)
GEOMETRY = PageGeometry(page_tokens=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, itemsize_bytes=4)


@dataclass
class Handle:
    runner: SlowRunner
    seconds: float

    def result(self) -> StepResult:
        self.runner.now_s += self.seconds
        return StepResult(())


class SlowRunner:
    """Takes a second for so many bytes copied or tokens computed, on its own clock. A copy ends when waited for.

    Args:
        first_s: what the first copy and the first step take beside.
    """

    def __init__(
        self, images: ProbedImages, bytes_s: float = 1e6, tokens_s: float = 100.0, first_s: float = 0.0, error: str = ""
    ) -> None:
        self.images = images
        self.bytes_s = bytes_s
        self.tokens_s = tokens_s
        self.first_s = first_s
        self.error = error or None
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.copying: deque[tuple[AdapterUid, float]] = deque()
        self.ended: list[LoadReport] = []

    def launch(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        for load in plan.load:
            image = self.images(load.uid)
            assert image.layout.pages == len(load.pages) == len(set(load.pages))
            first = self.first_s if len(self.plans) == 1 else 0.0
            self.copying.append((load.uid, first + image.num_bytes / self.bytes_s))
        return Handle(self, plan.num_tokens / self.tokens_s)

    def spare_s(self) -> float:
        return 0.0

    def wait_for_load(self) -> bool:
        uid, seconds = self.copying.popleft()
        self.now_s += seconds
        self.ended.append(LoadReport(uid, self.error))
        return True

    def poll_loads(self) -> list[LoadReport]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        pass

    def assert_is_as_new(self) -> None:
        loaded: set[AdapterUid] = set()
        seated: set[int] = set()
        for number, plan in enumerate(self.plans):
            assert plan.step == number
            seated -= set(plan.vacate)
            loaded -= set(plan.evict)
            loaded |= {load.uid for load in plan.load}
            assert not seated & {start.seat for start in plan.start}
            seated |= {start.seat for start in plan.start}
        assert not loaded
        assert not seated
        with pytest.raises(AdapterLoadFailed):
            self.images(AdapterUid("rate probe"))


def host_tier(uid: AdapterUid) -> AdapterImage:
    raise AdapterLoadFailed(uid, "it is not registered")


def image(num_pages: int = 100) -> AdapterImage | None:
    return probe_image(Shard(SPEC), GEOMETRY, torch.float32, StreamOrder.ROWS, num_pages)


def find(
    runner: SlowRunner, num_pages: int = 100, max_model_len: int = 1000, **settings: object
) -> tuple[float, float]:
    config = EngineConfig.from_mapping(settings)
    probe = RateProbe(runner, runner.images, now=lambda: runner.now_s)
    rates = find_rates(config, probe, GEOMETRY, max_model_len, lambda: image(num_pages))
    return rates.copy, rates.prefill


@pytest.fixture
def runner() -> SlowRunner:
    return SlowRunner(ProbedImages(host_tier))


def test_what_the_runner_takes_is_what_is_measured(runner: SlowRunner) -> None:
    assert find(runner) == pytest.approx((1e6, 100.0))
    assert find(SlowRunner(runner.images, 5e7, 3000.0)) == pytest.approx((5e7, 3000.0))
    runner.assert_is_as_new()


def test_what_the_first_copy_pays_once_does_not_count(runner: SlowRunner) -> None:
    runner.first_s = 10.0
    assert find(runner)[0] == pytest.approx(1e6)


def test_rates_that_are_set_are_taken_and_nothing_is_run(runner: SlowRunner) -> None:
    assert find(runner, copy_rate="3GB", prefill_rate=70) == (3e9, 70.0)
    assert runner.plans == []
    assert find(runner, copy_rate="3GB") == pytest.approx((3e9, 100.0))
    assert not any(plan.load for plan in runner.plans)


@pytest.mark.parametrize(("max_model_len", "most"), [(1, 48), (3, 48), (1000, 1), (1000, 500)])
def test_a_step_keeps_to_the_limits_of_steps_and_sequences(runner: SlowRunner, max_model_len: int, most: int) -> None:
    find(runner, max_model_len=max_model_len, max_batch_tokens=most, max_num_seqs=1)
    (step,) = [plan for plan in runner.plans if plan.num_tokens]
    assert step.num_tokens == min(48, most, max_model_len)
    for start in step.start:
        assert len(start.token_ids) <= max_model_len
        assert len(start.pages) == GEOMETRY.pages_for_tokens(len(start.token_ids))


def test_on_a_gpu_steps_are_whole_ones(runner: SlowRunner) -> None:
    config = EngineConfig(device="cuda", max_batch_tokens=1000, max_num_seqs=4)
    probe = RateProbe(runner, runner.images, now=lambda: runner.now_s)
    find_rates(config, probe, GEOMETRY, 4096, image)
    assert [plan.num_tokens for plan in runner.plans if plan.num_tokens] == [768, 768]
    runner.assert_is_as_new()


def test_the_largest_usual_adapter_that_the_pool_can_hold_is_copied(runner: SlowRunner) -> None:
    large, small = image(), image(10)
    assert large is not None
    assert small is not None
    assert 100 >= large.layout.pages > 10 >= small.layout.pages
    assert image(1) is None
    assert find(runner, num_pages=1)[0] == nominal_rates(EngineConfig()).copy


def test_a_link_that_fails_stops_the_start_and_says_why(runner: SlowRunner) -> None:
    runner.error = "the link is down"
    with pytest.raises(InterleafError, match="cannot be copied to the pool: the link is down"):
        find(runner)


def test_costs_are_seconds_a_page(runner: SlowRunner) -> None:
    costs = nominal_rates(EngineConfig()).costs(GEOMETRY)
    assert costs.adapter_s == pytest.approx(GEOMETRY.page_bytes / 4e9)
    assert costs.prefix_s == pytest.approx(GEOMETRY.page_tokens / 1e3)


@pytest.mark.parametrize(("name", "value"), [("copy_rate", 0), ("copy_rate", "fast"), ("prefill_rate", 0.5)])
def test_a_rate_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_mapping({name: value})
