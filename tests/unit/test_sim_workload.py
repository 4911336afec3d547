"""Drawn workloads have the rates, shares and lengths they are described by; traces are read or refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interleaf.errors import ConfigError
from interleaf.sim.workload import BASE, draw, read_trace

PLAIN: dict[str, Any] = {
    "num_requests": 20_000,
    "num_adapters": 50,
    "arrivals": "poisson:10",
    "popularity": "zipf:1",
    "prompt": "uniform:8-512",
    "output": "lognormal:165",
    "seed": 3,
}


def test_the_same_seed_draws_the_same_requests_and_another_seed_others() -> None:
    first, again, other = draw(**PLAIN), draw(**PLAIN), draw(**PLAIN | {"seed": 4})
    for name in ("arrival_s", "adapter", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
        assert not np.array_equal(getattr(first, name), getattr(other, name)), name


def test_changing_one_part_leaves_the_others_as_they_were() -> None:
    first, other = draw(**PLAIN), draw(**PLAIN | {"popularity": "uniform", "arrivals": "bursts:10"})
    assert np.array_equal(first.prompt_tokens, other.prompt_tokens)
    assert np.array_equal(first.output_tokens, other.output_tokens)
    assert not np.array_equal(first.adapter, other.adapter)


@pytest.mark.parametrize("arrivals", ["poisson:10", "bursts:10"])
def test_arrivals_come_in_order_at_the_rate_asked_for(arrivals: str) -> None:
    arrival_s = draw(**PLAIN | {"arrivals": arrivals}).arrival_s
    assert (np.diff(arrival_s) >= 0).all()
    assert len(arrival_s) / arrival_s[-1] == pytest.approx(10, rel=0.1)


def test_bursts_vary_more_than_a_poisson_process() -> None:
    """Requests in windows of a second: variance over mean is 1 for a Poisson process."""
    dispersion = {}
    for arrivals in ("poisson:10", "bursts:10"):
        arrival_s = draw(**PLAIN | {"arrivals": arrivals}).arrival_s
        counts = np.bincount(arrival_s.astype(int))
        dispersion[arrivals] = counts.var() / counts.mean()
    assert 0.8 < dispersion["poisson:10"] < 1.2
    assert dispersion["bursts:10"] > 4


def test_zipf_shares_fall_with_the_rank_and_uniform_ones_do_not() -> None:
    zipf = np.bincount(draw(**PLAIN).adapter, minlength=50) / 20_000
    weights = [1 / rank for rank in range(1, 51)]
    assert zipf == pytest.approx([weight / sum(weights) for weight in weights], abs=0.01)
    uniform = np.bincount(draw(**PLAIN | {"popularity": "uniform"}).adapter, minlength=50) / 20_000
    assert uniform == pytest.approx([1 / 50] * 50, abs=0.005)


def test_lengths_are_as_described() -> None:
    drawn = draw(**PLAIN)
    assert (drawn.prompt_tokens.min(), drawn.prompt_tokens.max()) == (8, 512)
    assert drawn.prompt_tokens.mean() == pytest.approx(260, rel=0.02)
    assert drawn.output_tokens.min() >= 1
    assert drawn.output_tokens.mean() == pytest.approx(165, rel=0.03)
    assert np.median(drawn.output_tokens) < 0.8 * drawn.output_tokens.mean(), "a lognormal one has a long tail"
    assert set(draw(**PLAIN | {"prompt": "fixed:7"}).prompt_tokens) == {7}


def test_a_share_of_the_requests_asks_for_the_base_model() -> None:
    drawn = draw(**PLAIN | {"base_share": 0.25})
    assert (drawn.adapter == BASE).mean() == pytest.approx(0.25, abs=0.01)
    assert drawn.num_asked_for == 50
    assert (draw(**PLAIN | {"num_adapters": 0}).adapter == BASE).all()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("arrivals", "poisson"),
        ("arrivals", "poisson:0"),
        ("arrivals", "sometimes:3"),
        ("popularity", "zipf:"),
        ("popularity", "uniform:3"),
        ("prompt", "uniform:9-3"),
        ("prompt", "uniform:9"),
        ("output", "lognormal:nan"),
        ("output", "normal:3"),
    ],
)
def test_a_description_that_means_nothing_is_refused_with_what_was_given(part: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        draw(**PLAIN | {part: text})


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(2.0, 1, 5, 6), (0.5, None, 7, 8), (2.0, 0, 9, 10)]
    names = ("arrival_s", "adapter", "prompt_tokens", "output_tokens")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == [0.5, 2.0, 2.0]
    assert trace.adapter.tolist() == [BASE, 1, 0]
    assert trace.prompt_tokens.tolist() == [7, 5, 9]
    assert trace.output_tokens.tolist() == [8, 6, 10]
    assert trace.num_adapters == 2


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"arrival_s": 0, "adapter": 0, "prompt_tokens": 3}',
        '{"arrival_s": 0, "adapter": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival_s": -1, "adapter": 0, "prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival_s": 0, "adapter": -2, "prompt_tokens": 1, "output_tokens": 1}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "adapter": 0, "prompt_tokens": 3, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 2"):
        read_trace(path)
