"""Weights, pages and step times of the simulator against sums done by hand, and the fit that finds a record's rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine_floor import StepCost
from bench.engine_log import StepLog
from bench.sim_record import write_record
from interleaf.core import Module
from interleaf.errors import ConfigError
from interleaf.sim.cost import Linear, Roofline, StepWork, roofline
from interleaf.sim.fit import fit, read_record
from interleaf.sim.hardware import GPUS, find_gpu
from interleaf.sim.link import Clock, Link
from interleaf.sim.shapes import model_shape


def test_a_transfer_waits_for_those_before_it_and_not_for_an_idle_link() -> None:
    link = Link(bytes_s=100.0, start_s=0.5)
    assert link.send(0.0, 100) == 1.5
    assert link.send(0.0, 50) == 2.5, "asked for at once, it follows the first"
    assert link.send(10.0, 100) == 11.5, "an idle link begins at once"
    assert link.busy_s == pytest.approx(4.0)


def test_a_clock_never_goes_back() -> None:
    clock = Clock()
    clock.reach(3.0)
    clock.reach(2.0)
    assert clock() == clock.now == 3.0


def test_llama_3_8b_weighs_what_it_is_known_to_weigh() -> None:
    shape = model_shape("llama3-8b")
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert shape.weight_bytes - shape.read_bytes == 128_256 * 4096 * 2, "a step does not read the embedding table"
    assert shape.geometry.token_bytes == 128 * 1024
    adapter = shape.adapter(16)
    assert adapter.num_bytes == 83_886_080
    assert adapter.pages == 40, "640 tokens of KV"
    assert shape.adapter(8, (Module.Q,)).num_bytes == 32 * 2 * 8 * (4096 + 4096)


def test_two_gpus_hold_half_of_a_model_each() -> None:
    one, two = model_shape("llama3-70b"), model_shape("llama3-70b", world=2)
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2)
    assert two.geometry.token_bytes == one.geometry.token_bytes // 2


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    cost = Roofline(
        overhead_s=1.0, bandwidth_bytes_s=100.0, flops_s=1000.0, read_bytes=200, token_bytes=10, flops_per_row=50.0
    )
    # (200 + 30 * 10 + 100) / 100 = 6 s of reading, 4 * 50 / 1000 = 0.2 s of computing
    assert cost.step_s(StepWork(4, 0, 30, 100)) == pytest.approx(1.0 + 6.0)
    # 3 s of reading, (4 + 196) * 50 / 1000 = 10 s of computing
    assert cost.step_s(StepWork(4, 196, 10, 0)) == pytest.approx(1.0 + 10.0)
    assert cost.step_s(StepWork(0, 0, 0, 0)) == 0.0, "a plan that only loads holds nobody up"


def test_on_an_h200_the_floor_of_a_decode_step_is_its_bytes_over_the_bandwidth() -> None:
    shape = model_shape("llama3-8b")
    cost = roofline(find_gpu("h200"), shape, overhead_s=0.0)
    work = StepWork(64, 0, 64 * 400, 64 * shape.adapter(16).num_bytes)
    assert cost.step_s(work) == pytest.approx((15.01e9 + 64 * 400 * 131_072 + 64 * 83.9e6) / 4.3e12, rel=0.001)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_every_gpu_says_where_its_figures_are_from(gpu: object) -> None:
    assert gpu.source  # type: ignore[attr-defined]
    assert 1e11 < gpu.bandwidth_bytes_s < 1e13  # type: ignore[attr-defined]
    assert 1e10 < gpu.link_bytes_s < 1e11  # type: ignore[attr-defined]


def test_an_unknown_gpu_or_model_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"h200.*got 'tpu'"):
        find_gpu("tpu")
    with pytest.raises(ConfigError, match=r"llama3-8b.*got 'gpt'"):
        model_shape("gpt")
    with pytest.raises(ConfigError, match="page_tokens must be one of"):
        model_shape("llama3-8b", page_tokens=3)
    with pytest.raises(ConfigError, match="num_heads=32"):
        model_shape("llama3-8b", world=3)


# ---------------------------------------------------------------- fit

KNOWN = Linear(overhead_s=2e-3, decode_row_s=7e-6, chunk_token_s=2e-5, context_token_s=3e-8, adapter_byte_s=2.5e-13)


def _works(count: int) -> list[StepWork]:
    rng = np.random.default_rng(5)
    return [
        StepWork(int(rows), int(chunk) * int(rng.random() < 0.3), int(rows * rng.integers(50, 800)), int(rows) * 10**8)
        for rows, chunk in zip(rng.integers(1, 257, count), rng.integers(1, 4000, count), strict=True)
    ]  # fmt: skip


def test_a_fit_finds_the_rates_that_made_the_record() -> None:
    works = _works(500)
    # Adapters and rows are made independent, as they must be in a record that is to tell them apart.
    works = [StepWork(w.decode_rows, w.chunk_tokens, w.context_tokens, i % 97 * 10**8) for i, w in enumerate(works)]
    found = fit(works, [KNOWN.step_s(work) for work in works])
    for name in ("overhead_s", "decode_row_s", "chunk_token_s", "context_token_s", "adapter_byte_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert found.error_max < 1e-6
    assert found.left_out == ()


def test_a_fit_says_how_far_off_it_is() -> None:
    works = _works(2000)
    rng = np.random.default_rng(6)
    seconds = [KNOWN.step_s(work) * float(rng.uniform(0.9, 1.1)) for work in works]
    found = fit(works, seconds)
    assert 0.03 < found.error_mean < 0.07
    assert found.error_mean < found.error_p90 < found.error_max < 0.12
    assert abs(found.total_error) < 0.01


def test_what_a_record_cannot_tell_apart_gets_no_negative_rate() -> None:
    works = [StepWork(rows, 0, rows * 100, 0) for rows in range(1, 100)]
    found = fit(works, [1e-3 + work.decode_rows * 1e-5 for work in works])
    assert all(rate >= 0 for rate in (found.cost.decode_row_s, found.cost.context_token_s, found.cost.overhead_s))
    assert {"chunk_tokens", "adapter_bytes"} <= set(found.left_out)
    assert found.error_max < 1e-6
    shrinking = [StepWork(rows, 1000 - 10 * rows, 0, 0) for rows in range(1, 100)]
    found = fit(shrinking, [2.0 - 0.01 * work.decode_rows + 1e-4 * work.chunk_tokens for work in shrinking])
    assert min(found.cost.decode_row_s, found.cost.chunk_token_s) >= 0


def test_a_record_is_read_and_its_rates_are_kept_in_a_file(tmp_path: Path) -> None:
    record = tmp_path / "steps.jsonl"
    names = ("decode_rows", "chunk_tokens", "context_tokens", "adapter_bytes", "seconds")
    rows = [(3, 0, 12, 5, 0.25), (1, 8, 9, 0, 0.5)]
    record.write_text("".join(json.dumps(dict(zip(names, row, strict=True)) | {"step": 1}) + "\n" for row in rows))
    works, seconds = read_record(record)
    assert (works, seconds) == ([StepWork(3, 0, 12, 5), StepWork(1, 8, 9, 0)], [0.25, 0.5])
    with pytest.raises(ConfigError, match="at least 5 steps"):
        fit(works, seconds)
    KNOWN.save(tmp_path / "rates.json")
    assert Linear.load(tmp_path / "rates.json") == KNOWN
    with pytest.raises(ConfigError, match="not a file that `fit` has saved"):
        Linear.load(record)
    record.write_text(record.read_text() + '{"decode_rows": 1}\n')
    with pytest.raises(ConfigError, match=r"steps\.jsonl, line 3"):
        read_record(record)


def test_a_log_of_an_engine_becomes_a_record_without_the_steps_that_waited_for_the_host(tmp_path: Path) -> None:
    log = StepLog(launched_s=[0.0, 0.5, 4.0, 4.5, 5.0], done_s=[1.0, 3.0, 5.0, 5.25, 9.0])
    costs = [
        StepCost(rows=rows, decode_rows=decode, adapters=1, weight_bytes=0, kv_bytes=640, adapter_bytes=7, flops=0)
        for rows, decode in ((4, 4), (4, 4), (4, 4), (9, 2), (0, 0))
    ]
    assert write_record(tmp_path / "steps.jsonl", log, costs, token_bytes=64) == 2
    works, seconds = read_record(tmp_path / "steps.jsonl")
    assert works == [StepWork(4, 0, 14, 7), StepWork(2, 7, 19, 7)], "the third was launched after the second was read"
    assert seconds == [2.0, 0.25]
