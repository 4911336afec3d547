"""Whole simulations: times worked out by hand, nobody lost, the same twice, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from interleaf.core import ModelSpec
from interleaf.errors import ConfigError, PoolTooSmall
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from interleaf.sim.cli import app
from interleaf.sim.cost import Linear, StepWork
from interleaf.sim.hardware import Gpu
from interleaf.sim.report import Figures, figures
from interleaf.sim.shapes import AdapterShape, ModelShape
from interleaf.sim.simulate import Outcome, simulate
from interleaf.sim.workload import BASE, Workload, draw
from interleaf.sim.world import Settings, World, build_world

SPEC = ModelSpec(
    family="llama", vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, rms_norm_eps=1e-5, max_position=4096,
)  # fmt: skip
PAGE_BYTES = 4 * 2 * 16 * 2
MODEL = ModelShape(SPEC, PageGeometry(4, 1, 1, 16, 2), Shard(SPEC), 1000, 1000, 2.0)
GPU = Gpu("tiny", 1e6, 1e9, 1e9, link_bytes_s=PAGE_BYTES, source="made up: a page a second")
COST = Linear(overhead_s=1.0, decode_row_s=0.01, chunk_token_s=0.1, context_token_s=0.001, adapter_byte_s=0.0001)
ADAPTER = AdapterShape(num_bytes=100, pages=5)


def workload(*rows: tuple[float, int, int, int], num_adapters: int = 0) -> Workload:
    """Requests (arrival_s, adapter, prompt tokens, output tokens)."""
    arrival_s, adapter, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Workload(arrival_s.astype(float), adapter, prompt, output, num_adapters)


def world(load: Workload, **settings: Any) -> World:
    values: dict[str, Any] = {"pool_pages": 100, "max_num_seqs": 4, "max_batch_tokens": 64} | settings
    adapters = [ADAPTER] * load.num_adapters
    return build_world(load, model=MODEL, gpu=GPU, adapters=adapters, settings=Settings(**values), cost=COST)


def run(load: Workload, *, max_tokens: int | None = None, **settings: Any) -> tuple[World, Outcome]:
    made = world(load, **settings)
    return made, simulate(made, load, max_tokens=max_tokens)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("overlap", [True, False])
def test_one_request_takes_the_sum_of_its_steps(overlap: bool) -> None:
    _, outcome = run(workload((2.0, BASE, 3, 3)), overlap=overlap)
    prompt = 1 + 3 * 0.1 + 3 * 0.001
    decode = [1 + 0.01 + 4 * 0.001, 1 + 0.01 + 5 * 0.001]
    assert outcome.first_token_s[0] == pytest.approx(2.0 + prompt)
    assert outcome.ended_s[0] == pytest.approx(2.0 + prompt + sum(decode))
    assert (outcome.counts.steps, outcome.counts.output_tokens, outcome.counts.computed_tokens) == (3, 3, 5)
    assert outcome.busy_s == pytest.approx(prompt + sum(decode))


def test_an_end_that_nobody_foresees_costs_one_row_in_excess_when_the_host_is_ahead() -> None:
    load = workload((0.0, BASE, 3, 3))
    planned = run(load)[1]
    foreseen_by_nobody = {overlap: run(load, max_tokens=50, overlap=overlap)[1] for overlap in (True, False)}
    for outcome in foreseen_by_nobody.values():
        assert outcome.counts.output_tokens == 3
        assert outcome.ended_s[0] == pytest.approx(planned.ended_s[0])
    assert foreseen_by_nobody[False].counts.computed_tokens == 5
    assert foreseen_by_nobody[True].counts.computed_tokens == 6


def test_a_cold_adapters_request_waits_for_its_copy_and_the_base_request_beside_it_does_not() -> None:
    load = workload((0.0, 0, 2, 1), (0.0, BASE, 2, 40), num_adapters=1)
    _, outcome = run(load)
    first = 1 + 0.2 + 0.002
    assert outcome.first_token_s[1] == pytest.approx(first), "nobody waits for somebody else's load"
    assert outcome.first_token_s[0] > 5.0, "five pages at a page a second"
    # The base request decodes from the second step on, one token a step of 1 + 0.01 + context / 1000 seconds; the
    # host learns of the copy's end, at 5.0, when it has read the step that runs then, and one more step runs before
    # the one that it can still change.
    ends = np.cumsum([first, *(1.01 + (2 + n) * 0.001 for n in range(1, 40))])
    running = int(np.searchsorted(ends, 5.0))
    mixed = 1 + 0.01 + 2 * 0.1 + (2 + 2 + running + 2) * 0.001 + 100 * 0.0001
    assert outcome.first_token_s[0] == pytest.approx(ends[running + 1] + mixed)
    assert outcome.counts.misses == outcome.counts.loads == 1


def test_a_copy_begins_with_its_step_because_the_step_before_may_still_use_its_pages() -> None:
    load = workload((0.0, BASE, 2, 40), (0.5, 0, 2, 1), num_adapters=1)
    _, outcome = run(load)
    ends = np.cumsum([1 + 0.2 + 0.002, *(1.01 + (2 + n) * 0.001 for n in range(1, 40))])
    # It arrives during step 0, is handed over when that has been read, and gets its pages in the plan of step 2.
    copied_s = ends[1] + 5.0
    running = int(np.searchsorted(ends, copied_s))
    mixed = 1 + 0.01 + 2 * 0.1 + (2 + 2 + running + 2) * 0.001 + 100 * 0.0001
    assert outcome.first_token_s[1] == pytest.approx(ends[running + 1] + mixed)


def test_a_prompt_of_two_chunks_has_its_first_token_after_the_second() -> None:
    _, outcome = run(workload((0.0, BASE, 100, 1)), max_batch_tokens=64)
    first, second = 1 + 64 * 0.1 + 64 * 0.001, 1 + 36 * 0.1 + 100 * 0.001
    assert outcome.started_s[0] == 0.0
    assert outcome.first_token_s[0] == pytest.approx(first + second)


def test_the_step_rate_is_unchanged_while_twenty_slow_loads_run() -> None:
    """Five seconds a load, steps of some ten milliseconds: those that run must not notice the others' adapters."""
    cost = Linear(0.01, 1e-5, 1e-4, 1e-6, 1e-6)
    warm = [(0.0, 0, 4, 1)]
    running = [(6.0, BASE, 4, 300), (6.0, 0, 4, 300)]
    cold = [(6.0, 1 + index, 4, 10) for index in range(20)]
    ended_s = []
    for others in ([], cold):
        load = workload(*warm, *running, *others, num_adapters=21)
        made = build_world(
            load, model=MODEL, gpu=GPU, adapters=[ADAPTER] * 21, cost=cost,
            settings=Settings(pool_pages=1000, max_num_seqs=32, max_batch_tokens=64),
        )  # fmt: skip
        outcome = simulate(made, load)
        ended_s.append(outcome.ended_s[1:3])
    assert outcome.first_token_s[3:].min() > 6 + 5
    assert outcome.first_token_s[3:].max() > 6 + 20 * 5
    assert (ended_s[0] < 6 + 5).all()
    assert ended_s[0] == pytest.approx(ended_s[1], abs=1e-12)


def test_copies_share_one_link_and_follow_each_other() -> None:
    load = workload((0.0, 0, 1, 1), (0.0, 1, 1, 1), num_adapters=2)
    _, outcome = run(load)
    step = 1 + 0.1 + 0.001 + 100 * 0.0001
    assert outcome.first_token_s[0] == pytest.approx(5.0 + step)
    assert outcome.first_token_s[1] == pytest.approx(10.0 + step)
    assert outcome.link_busy_s == pytest.approx(10.0)


def test_looking_ahead_hides_a_copy_behind_the_request_that_has_the_seat() -> None:
    load = workload((0.0, BASE, 1, 20), (0.5, 0, 1, 1), num_adapters=1)
    step = 1 + 0.1 + 0.001 + 100 * 0.0001
    ends_s, first_token_s = {}, {}
    for prefetch_loads in (0, 1):
        _, outcome = run(load, max_num_seqs=1, prefetch_loads=prefetch_loads)
        ends_s[prefetch_loads], first_token_s[prefetch_loads] = outcome.ended_s[0], outcome.first_token_s[1]
        assert outcome.counts.prefetches == prefetch_loads
        assert outcome.counts.prefetched_unused == 0
    assert ends_s[0] == ends_s[1]
    assert first_token_s[1] == pytest.approx(ends_s[1] + step)
    assert first_token_s[0] == pytest.approx(ends_s[0] + 5.0 + step)


def test_rows_of_one_adapter_read_its_weights_once() -> None:
    works: list[StepWork] = []
    load = workload((0.0, 0, 2, 9), (0.0, 0, 2, 9), (0.0, 1, 2, 9), (0.0, BASE, 2, 9), num_adapters=2)
    made = build_world(
        load, model=MODEL, gpu=GPU, adapters=[ADAPTER, AdapterShape(7, 1)], cost=COST,
        settings=Settings(pool_pages=100, max_num_seqs=4, max_batch_tokens=64),
        record=lambda work, seconds: works.append(work),
    )  # fmt: skip
    simulate(made, load)
    assert {work.adapter_bytes for work in works} == {0, 7, 100, 107}
    assert sum(work.rows for work in works) == 4 * (2 + 8)


def test_an_adapter_beyond_host_memory_is_read_from_disk_first() -> None:
    load = workload((0.0, 0, 1, 1), (100.0, 1, 1, 1), (200.0, 0, 1, 1), num_adapters=2)
    two_seconds = ADAPTER.pages * PAGE_BYTES / 2
    step = 1 + 0.1 + 0.001 + 100 * 0.0001
    settings = {"disk_bytes_s": two_seconds, "pool_pages": 7}  # one adapter and a sequence: the pool forgets, too
    _, both = run(load, host_memory_bytes=2.0 * ADAPTER.pages * PAGE_BYTES, **settings)
    assert both.first_token_s - load.arrival_s == pytest.approx([2 + 5 + step, 2 + 5 + step, 5 + step])
    assert (both.counts.disk_reads, both.counts.loads, both.counts.reloads) == (2, 3, 1)
    _, one = run(load, host_memory_bytes=1.0 * ADAPTER.pages * PAGE_BYTES, **settings)
    assert one.first_token_s - load.arrival_s == pytest.approx([2 + 5 + step] * 3)
    assert one.counts.disk_reads == 3


def test_what_is_used_last_leaves_host_memory_last() -> None:
    order = [0, 1, 0, 2, 0, 1]
    load = workload(*((100.0 * place, uid, 1, 1) for place, uid in enumerate(order)), num_adapters=3)
    disk = ADAPTER.pages * PAGE_BYTES / 2
    _, outcome = run(load, host_memory_bytes=2.0 * ADAPTER.pages * PAGE_BYTES, disk_bytes_s=disk, pool_pages=7)
    waits_for_disk = (outcome.first_token_s - load.arrival_s) > 7.0
    assert waits_for_disk.tolist() == [True, True, False, True, False, True]


# ---------------------------------------------------------------- whole


def _mixed(seed: int, arrivals: str = "poisson:0.5", count: int = 150) -> Workload:
    return draw(
        num_requests=count, num_adapters=12, arrivals=arrivals, popularity="zipf:1", prompt="uniform:1-30",
        output="uniform:1-40", base_share=0.2, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("arrivals", ["poisson:0.2", "bursts:0.5", "once"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool_pages": 40},
        {"pool_pages": 40, "eviction": "lru", "prefetch_loads": 0, "admission": "optimistic"},
        {"pool_pages": 40, "prefix_cache": True, "admission": "conservative", "overlap": False},
        {"host_memory_bytes": 6000.0, "disk_bytes_s": 500.0},
    ],
)
@pytest.mark.parametrize("max_tokens", [None, 45])
def test_every_request_ends_once_with_all_its_tokens_and_pages_balance(
    arrivals: str, settings: dict[str, Any], max_tokens: int | None
) -> None:
    load = _mixed(1, arrivals)
    made, outcome = run(load, max_tokens=max_tokens, **settings)
    assert not np.isnan(outcome.ended_s).any()
    assert outcome.counts.output_tokens == load.output_tokens.sum()
    assert (outcome.started_s >= load.arrival_s).all()
    assert (outcome.first_token_s > outcome.started_s).all()
    assert (outcome.ended_s >= outcome.first_token_s).all()
    counts = outcome.counts
    assert counts.hits + counts.misses + counts.late_prefetches == (load.adapter != BASE).sum()
    assert counts.reloads == counts.loads - load.num_asked_for >= 0
    assert counts.prefetched_unused <= counts.prefetches <= counts.loads
    made.allocator.check()
    assert made.allocator.num_used_pages(OwnerKind.KV) == 0
    rows = load.prompt_tokens.sum() + load.output_tokens.sum() - len(load)
    if counts.preemptions == 0 and max_tokens is None:
        assert counts.computed_tokens == rows
    else:
        assert counts.computed_tokens >= rows


def test_a_small_pool_preempts_and_reloads_and_still_answers() -> None:
    _, outcome = run(_mixed(2, "once"), pool_pages=24)
    assert outcome.counts.preemptions > 0
    assert outcome.counts.reloads > 0


def _repeatable(of: Figures) -> dict[str, Any]:
    return {key: value for key, value in asdict(of).items() if key not in ("plan_us", "host_s")}


def test_two_runs_of_one_workload_give_the_same_figures_to_the_last_bit() -> None:
    load = _mixed(3)
    first, again, other = (figures(run(of, pool_pages=40)[1], of) for of in (load, _mixed(3), _mixed(4)))
    assert json.dumps(_repeatable(first)) == json.dumps(_repeatable(again))
    assert _repeatable(first) != _repeatable(other)


def test_more_memory_never_means_more_reloads_on_this_workload() -> None:
    reloads = [run(_mixed(5), pool_pages=pages)[1].counts.reloads for pages in (24, 60, 200)]
    assert reloads[0] > reloads[1] > reloads[2] == 0


def test_the_warm_up_is_left_out_of_the_figures() -> None:
    load = _mixed(6)
    made = world(load, pool_pages=40)
    outcome = simulate(made, load, warm_up=50)
    warm, whole = figures(outcome, load), figures(run(load, pool_pages=40)[1], load)
    assert (warm.requests, whole.requests) == (100, 150)
    assert 0 < warm.loads < whole.loads
    assert warm.ttft_mean_s == pytest.approx((outcome.first_token_s - load.arrival_s)[50:].mean())
    assert outcome.warm_at_s == load.arrival_s[50]
    assert {field.name for field in fields(Figures)} >= {"hit_rate", "reloads", "prefetched_unused", "plan_us"}


def test_time_spent_waiting_is_told_by_reason() -> None:
    load = workload(*[(0.0, BASE, 4, 60)] * 9)
    _, outcome = run(load)
    queued = outcome.started_s.sum()
    assert sum(outcome.waited_s.values()) == pytest.approx(queued, rel=0.2), "samples of the queue add up to the waits"


def test_a_request_that_could_never_run_is_refused_before_anything_runs() -> None:
    with pytest.raises(PoolTooSmall, match="a sequence of 500 tokens needs 130 pages"):
        world(workload((0.0, 0, 400, 100), num_adapters=1))
    with pytest.raises(ConfigError, match="the weights take"):
        build_world(
            workload((0.0, BASE, 1, 1)), adapters=[], settings=Settings(), model=MODEL,
            gpu=Gpu("small", 1000, 1, 1, 1, ""),
        )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_batch_tokens": 3},
        {"refill_seats": 5},
        {"prefetch_loads": 33},
        {"eviction": "fifo"},
        {"admission": "never"},
        {"disk_bytes_s": 0.0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Settings(**{"max_num_seqs": 4, "max_batch_tokens": 64} | settings)


# ---------------------------------------------------------------- the command line

COMMON = ["run", "--requests", "40", "--num-adapters", "8", "--arrivals", "poisson:50", "--output", "fixed:20"]


def test_a_run_records_steps_that_a_fit_reads_and_a_run_can_use(tmp_path: Path) -> None:
    command = CliRunner()
    record, rates = tmp_path / "steps.jsonl", tmp_path / "rates.json"
    result = command.invoke(app, [*COMMON, "--record", str(record), "--json", "--warm-up", "0"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["requests"] == 40
    assert len(record.read_text().splitlines()) <= found["steps"]
    fitted = command.invoke(app, ["fit", str(record), "--save", str(rates)])
    assert fitted.exit_code == 0, fitted.output
    assert "overhead" in fitted.output
    again = command.invoke(app, [*COMMON, "--cost", str(rates), "--json", "--warm-up", "0"])
    assert json.loads(again.output)["ttft_mean_s"] == pytest.approx(found["ttft_mean_s"], rel=0.3)


def test_without_adapters_there_is_no_hit_rate() -> None:
    options = ["run", "--requests", "40", "--num-adapters", "0", "--arrivals", "poisson:50", "--output", "fixed:20"]
    text = CliRunner().invoke(app, options)
    assert text.exit_code == 0, text.output
    (line,) = [line for line in text.output.splitlines() if line.startswith("hit rate")]
    assert line.split() == ["hit", "rate", "-"]
    assert json.loads(CliRunner().invoke(app, [*options, "--json"]).output)["hit_rate"] is None


def test_the_command_line_says_what_is_wrong_in_one_line() -> None:
    for options in (
        ["--gpu", "tpu"],
        ["--arrivals", "never"],
        ["--ranks", "0"],
        ["--targets", "most"],
        ["--warm-up", "1"],
    ):
        result = CliRunner().invoke(app, [*COMMON, *options])
        assert result.exit_code == 2, options
        assert result.output.startswith("error: ")
        assert len(result.output.splitlines()) == 1


def test_the_simulator_never_imports_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import interleaf.sim.cli"
    subprocess.run([sys.executable, "-c", script], check=True)
