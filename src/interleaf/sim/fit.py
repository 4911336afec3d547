"""Fits the rates of a cost model to a record of steps. Knows least squares; not where the record comes from.

A record is JSON lines, one step each: decode_rows, chunk_tokens, context_tokens, adapter_bytes (`cost.StepWork` says
what they are) and seconds. Other keys are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interleaf.errors import ConfigError
from interleaf.sim.cost import Linear, StepWork

_FEATURES = ("decode_rows", "chunk_tokens", "context_tokens", "adapter_bytes")


@dataclass(frozen=True, slots=True)
class Fit:
    """Rates, and how well they tell the record's times.

    Attributes:
        error_*: |told - measured| / measured over the steps: mean, 90th percentile, and the worst.
        total_error: of the sum of all steps, signed: what a simulation of the whole record would be off by.
        left_out: rates that would have been negative and are zero: the record does not tell them apart from others.
    """

    cost: Linear
    num_steps: int
    error_mean: float
    error_p90: float
    error_max: float
    total_error: float
    left_out: tuple[str, ...]


def read_record(path: Path) -> tuple[list[StepWork], list[float]]:
    """The steps of a record and their seconds. Raises: ConfigError: a line is not such an object."""
    works, seconds = [], []
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                works.append(StepWork(*(int(row[name]) for name in _FEATURES)))
                seconds.append(float(row["seconds"]))
                if min(row[name] for name in _FEATURES) < 0 or not 0 < seconds[-1] < float("inf"):
                    raise ValueError("a count is negative, or seconds are not positive")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}, line {number}: {error!r}") from error
    return works, seconds


def fit(works: Sequence[StepWork], seconds: Sequence[float]) -> Fit:
    """Least squares of relative errors, so that a short step counts as much as a long one; no rate below zero.

    Raises: ConfigError: fewer steps than rates.
    """
    if len(works) < len(_FEATURES) + 1:
        raise ConfigError(f"at least {len(_FEATURES) + 1} steps are needed for a fit, got {len(works)}")
    measured = np.array(seconds, dtype=np.float64)
    columns = np.array([[1, *(getattr(work, name) for name in _FEATURES)] for work in works], dtype=np.float64)
    scale = np.maximum(
        np.abs(columns).max(axis=0), 1e-300
    )  # bytes and constants in one matrix: keep it well conditioned
    weighted = columns / scale / measured[:, None]
    rates = _not_negative(weighted) / scale
    told = columns @ rates
    errors = np.abs(told - measured) / measured
    names = ("overhead", *_FEATURES)
    return Fit(
        cost=Linear(*(float(rate) for rate in rates)),
        num_steps=len(works),
        error_mean=float(errors.mean()),
        error_p90=float(np.percentile(errors, 90)),
        error_max=float(errors.max()),
        total_error=float(told.sum() / measured.sum() - 1),
        left_out=tuple(name for name, rate in zip(names, rates, strict=True) if rate == 0.0),
    )


def _not_negative(weighted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rates >= 0 that bring every weighted row nearest to 1: the most negative one is left out until none is.

    Columns that are all zero are left out from the start.
    """
    rates = np.zeros(weighted.shape[1])
    kept = [column for column in range(weighted.shape[1]) if weighted[:, column].any()]
    while kept:
        found = np.linalg.lstsq(weighted[:, kept], np.ones(len(weighted)), rcond=None)[0]
        if found.min() >= 0:
            rates[kept] = found
            break
        del kept[int(found.argmin())]
    return rates


def as_text(of: Fit) -> str:
    """One rate a line, in its own unit, then the errors."""
    cost = of.cost
    lines = [
        ("overhead", f"{cost.overhead_s * 1e6:,.1f} us a step"),
        ("decode row", f"{cost.decode_row_s * 1e6:,.3f} us"),
        ("prompt token", f"{cost.chunk_token_s * 1e6:,.3f} us"),
        ("context token", f"{cost.context_token_s * 1e9:,.3f} ns"),
        ("adapter", f"{cost.adapter_byte_s * 1e15:,.3f} us a GB"),
        ("error", f"{of.error_mean:.1%} in the mean, 90 % below {of.error_p90:.1%}, worst {of.error_max:.1%}"),
        ("sum of all steps", f"off by {of.total_error:+.2%} over {of.num_steps:,} steps"),
    ]
    if of.left_out:
        lines.append(("not told by the record", ", ".join(of.left_out)))
    return "\n".join(f"{name:<24} {value}" for name, value in lines)
