"""Who asks for what and when, as arrays: drawn by seed, or read from a trace. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interleaf.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BASE = -1
"""In place of an adapter: the base model."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """N requests in order of arrival.

    Attributes:
        arrival_s: [N], ascending.
        adapter: [N], from 0 to num_adapters - 1, or BASE.
        prompt_tokens, output_tokens: [N]; exactly that many are generated.
        num_adapters: adapters that could be named.
    """

    arrival_s: Floats
    adapter: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    num_adapters: int

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def num_asked_for(self) -> int:
        """Distinct adapters that requests name."""
        return int(np.unique(self.adapter[self.adapter != BASE]).size)


def read_trace(path: Path) -> Workload:
    """A trace of JSON lines: arrival_s, adapter (index or null), prompt_tokens, output_tokens.

    Raises: ConfigError: the file cannot be read, or a line is not such an object.
    """
    rows: list[tuple[float, int, int, int]] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                adapter = BASE if row["adapter"] is None else int(row["adapter"])
                rows.append((float(row["arrival_s"]), adapter, int(row["prompt_tokens"]), int(row["output_tokens"])))
                if adapter < BASE or min(rows[-1][2:]) < 1 or not 0 <= rows[-1][0] < float("inf"):
                    raise ValueError("an arrival, an adapter or a length is out of range")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}, line {number}: {error!r}") from error
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    rows.sort(key=lambda row: row[0])  # stable: those that arrive together keep their order
    arrival_s, adapter_of, prompt, output = zip(*rows, strict=True)
    adapters = np.array(adapter_of, dtype=np.int64)
    return Workload(
        np.array(arrival_s, dtype=np.float64), adapters, np.array(prompt), np.array(output), int(adapters.max()) + 1
    )


def draw(
    *,
    num_requests: int,
    num_adapters: int,
    arrivals: str,
    popularity: str,
    prompt: str,
    output: str,
    base_share: float = 0.0,
    seed: int = 0,
) -> Workload:
    """A workload from its description; the same arguments give the same requests.

    Args:
        arrivals: "once", "poisson:RATE" or "bursts:RATE" (a second; see `_bursts`).
        popularity: "uniform" or "zipf:A", where adapter i is asked for in proportion to (i + 1)^-A.
        prompt, output: tokens: "fixed:N", "uniform:LOW-HIGH" (inclusive) or "lognormal:MEAN" (sigma 0.8, 1 to 4096).
        base_share: of requests that ask for the base model.
    Raises: ConfigError: a description is not one of these.
    """
    if num_requests < 1 or num_adapters < 0 or not 0 <= base_share <= 1:
        raise ConfigError(
            f"at least 1 request, 0 adapters and a base share from 0 to 1 are needed, got {num_requests}, "
            f"{num_adapters} and {base_share}"
        )
    # One stream of random numbers for each part: changing one part leaves the others as they were.
    rng = [np.random.default_rng([seed, part]) for part in range(5)]
    adapter = np.full(num_requests, BASE, dtype=np.int64)
    if num_adapters:
        named = rng[1].random(num_requests) >= base_share
        adapter[named] = _popular(popularity, num_adapters, rng[2])(int(named.sum()))
    return Workload(
        arrival_s=_arrivals(arrivals, num_requests, rng[0]),
        adapter=adapter,
        prompt_tokens=_lengths("prompt", prompt, num_requests, rng[3]),
        output_tokens=_lengths("output", output, num_requests, rng[4]),
        num_adapters=num_adapters,
    )


# ---------------------------------------------------------------- parts


def _arrivals(text: str, count: int, rng: np.random.Generator) -> Floats:
    kind, _, value = text.partition(":")
    if kind == "once" and not value:
        return np.zeros(count)
    rate = _numbers("arrivals", text, value, 1)[0]
    # Arrivals of a process with rate 1, in units of the requests expected so far.
    expected = np.cumsum(rng.exponential(size=count))
    match kind:
        case "poisson":
            return expected / rate
        case "bursts":
            return _bursts(expected, rate, rng)
    raise ConfigError(f"arrivals must be once, poisson:RATE or bursts:RATE, got {text!r}")


BURST_FACTOR, BURST_SHARE, BURST_S = 3.0, 0.2, 1.0


def _bursts(expected: Floats, rate: float, rng: np.random.Generator) -> Floats:
    """A Poisson process of two phases in turn (MMPP-2): 3 times the mean rate for a fifth of the time, half of it else.

    Phases last 1 s and 4 s in the mean, exponentially distributed.
    """
    calm_factor = (1 - BURST_FACTOR * BURST_SHARE) / (1 - BURST_SHARE)
    calm_s = BURST_S * (1 - BURST_SHARE) / BURST_SHARE
    begins_s, requests = [0.0], [0.0]
    while requests[-1] < expected[-1]:
        for mean_s, factor in ((calm_s, calm_factor), (BURST_S, BURST_FACTOR)):
            duration_s = float(rng.exponential(mean_s))
            begins_s.append(begins_s[-1] + duration_s)
            requests.append(requests[-1] + duration_s * factor * rate)
    return np.interp(expected, requests, begins_s)


def _popular(text: str, num_adapters: int, rng: np.random.Generator) -> Callable[[int], Ints]:
    kind, _, value = text.partition(":")
    if kind == "uniform" and not value:
        return lambda count: rng.integers(num_adapters, size=count)
    if kind == "zipf":
        exponent = _numbers("popularity", text, value, 1)[0]
        share = np.cumsum(np.arange(1, num_adapters + 1) ** -exponent)
        return lambda count: np.searchsorted(share / share[-1], rng.random(count), side="right")
    raise ConfigError(f"popularity must be uniform or zipf:A, got {text!r}")


_SIGMA, _LONGEST = 0.8, 4096


def _lengths(name: str, text: str, count: int, rng: np.random.Generator) -> Ints:
    kind, _, value = text.partition(":")
    match kind:
        case "fixed":
            return np.full(count, round(_numbers(name, text, value, 1)[0]), dtype=np.int64)
        case "uniform":
            low, high = (round(number) for number in _numbers(name, text, value, 2))
            if low <= high:
                return rng.integers(low, high, size=count, endpoint=True)
        case "lognormal":
            mean = _numbers(name, text, value, 1)[0]
            drawn = rng.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, size=count)
            return np.clip(np.rint(drawn), 1, _LONGEST).astype(np.int64)
    raise ConfigError(f"{name} must be fixed:N, uniform:LOW-HIGH or lognormal:MEAN, got {text!r}")


def _numbers(name: str, text: str, value: str, count: int) -> list[float]:
    """Positive numbers joined by "-"."""
    try:
        numbers = [float(part) for part in value.split("-")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{name}={text!r}: {count} positive number{'s' * (count > 1)} must follow the colon")
    return numbers
