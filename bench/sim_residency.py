"""The residency study: what look-ahead prefetch and cost-aware eviction are worth when adapters outgrow the pool.

    python -m bench.sim_residency [--requests N] [--processes N] [--out FOLDER]

Simulated, so that it repeats to the last digit: the engine's scheduler and residency on a modelled H200. Writes
residency.json (every seed) and residency.md (medians, and what each addition does to the row before it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from interleaf.sim.hardware import find_gpu
from interleaf.sim.report import figures
from interleaf.sim.shapes import model_shape
from interleaf.sim.simulate import simulate
from interleaf.sim.workload import Workload, draw
from interleaf.sim.world import Settings, build_world

MODEL, GPU, RANK, NUM_ADAPTERS = "llama3-8b", "h200", 16, 600
SEATS = 256
LENGTHS = "uniform:8-512"
LOAD = 0.7
WARM_UP = 1 / 3
SEEDS = (0, 1, 2, 3, 4)
CALIBRATION_SEED = 100
OVERSUBSCRIPTION = (1, 2, 5, 20)

WORKLOADS = {
    "uniform": {"arrivals": "poisson", "popularity": "uniform"},
    "Zipf 1": {"arrivals": "poisson", "popularity": "zipf:1"},
    "bursts": {"arrivals": "bursts", "popularity": "zipf:1"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "FCFS + LRU": {"eviction": "lru", "prefetch_loads": 0},
    "+ look-ahead": {"eviction": "lru"},
    "+ cost-aware eviction": {},
}
FIGURES = (
    "output_tokens_s", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "hit_rate", "loads", "reloads", "prefetches",
    "prefetched_unused", "preemptions",
)  # fmt: skip
NEUTRAL = 0.02


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of the study. A pool of None pages holds whatever the GPU's memory does."""

    workload: str
    rate: float | None
    pool_pages: int | None
    policy: str
    seed: int
    requests: int


def requests_of(cell: Cell) -> Workload:
    described = WORKLOADS[cell.workload]
    return draw(
        num_requests=cell.requests,
        num_adapters=NUM_ADAPTERS,
        arrivals="once" if cell.rate is None else f"{described['arrivals']}:{cell.rate}",
        popularity=described["popularity"],
        prompt=LENGTHS,
        output=LENGTHS,
        seed=cell.seed,
    )


def run(cell: Cell) -> dict[str, Any]:
    """One simulation's figures."""
    workload = requests_of(cell)
    shape = model_shape(MODEL)
    world = build_world(
        workload,
        model=shape,
        gpu=find_gpu(GPU),
        adapters=[shape.adapter(RANK)] * NUM_ADAPTERS,
        settings=Settings(pool_pages=cell.pool_pages, max_num_seqs=SEATS, **POLICIES[cell.policy]),
    )
    warm_up = 0 if cell.rate is None else int(cell.requests * WARM_UP)
    found = asdict(figures(simulate(world, workload, warm_up=warm_up), workload))
    return {key: float(f"{found[key]:.6g}") for key in (*FIGURES, "requests_s", "peak_kv_pages")}


def study(num_requests: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Calibrate, then every cell. Returns: what residency.json holds."""
    first = next(iter(POLICIES))
    saturated = pool.map(run, [Cell(name, None, None, first, CALIBRATION_SEED, num_requests) for name in WORKLOADS])
    rates = {name: float(f"{LOAD * of['requests_s']:.4g}") for name, of in zip(WORKLOADS, saturated, strict=True)}
    at_load = [Cell(name, rates[name], None, first, seed, num_requests) for name, seed in product(WORKLOADS, SEEDS)]
    peaks = dict.fromkeys(WORKLOADS, 0)
    for cell, of in zip(at_load, pool.map(run, at_load), strict=True):
        peaks[cell.workload] = max(peaks[cell.workload], int(of["peak_kv_pages"]))
    adapter_pages = NUM_ADAPTERS * model_shape(MODEL).adapter(RANK).pages
    keys = list(product(WORKLOADS, OVERSUBSCRIPTION, POLICIES))
    cells = [
        Cell(name, rates[name], peaks[name] + -(-adapter_pages // times), policy, seed, num_requests)
        for name, times, policy in keys
        for seed in SEEDS
    ]
    done = []
    for of in pool.map(run, cells):
        done.append(of)
        if len(done) % 20 == 0:
            print(f"{len(done)} of {len(cells)}", file=sys.stderr)
    results = iter(done)
    rows = []
    for (name, times, policy), pages in zip(keys, (cell.pool_pages for cell in cells[:: len(SEEDS)]), strict=True):
        seeds = [next(results) for _ in SEEDS]
        rows.append(
            {
                "workload": name,
                "adapter_bytes_over_room": times,
                "policy": policy,
                "pool_pages": pages,
                "median": {key: statistics.median(of[key] for of in seeds) for key in FIGURES},
                "seeds": [{key: of[key] for key in FIGURES} for of in seeds],
            }
        )
    return {
        "model": MODEL,
        "gpu": GPU,
        "adapters": NUM_ADAPTERS,
        "rank": RANK,
        "adapter_pages": adapter_pages,
        "seats": SEATS,
        "lengths": LENGTHS,
        "requests": num_requests,
        "warm_up": WARM_UP,
        "seeds": SEEDS,
        "load": LOAD,
        "requests_s": rates,
        "kv_pages": peaks,
        "rows": rows,
    }


# ---------------------------------------------------------------- as a page


@dataclass(frozen=True, slots=True)
class Change:
    """What an addition does to a row, as shares of the row before it."""

    tokens: float
    ttft: float

    @property
    def is_loss(self) -> bool:
        """More than what counts as neutral, on either figure."""
        return self.tokens < -NEUTRAL or self.ttft > NEUTRAL

    def __str__(self) -> str:
        return f"{self.tokens:+.1%}, {self.ttft:+.1%}" + " **worse**" * self.is_loss


def changes(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Change | None]]:
    """Each row, and what its addition does; None for the first policy."""
    before: dict[str, Any] = {}
    for row in rows:
        of = row["median"]
        is_first = row["policy"] == next(iter(POLICIES))
        yield (
            row,
            None
            if is_first
            else Change(
                of["output_tokens_s"] / before["output_tokens_s"] - 1, of["ttft_mean_s"] / before["ttft_mean_s"] - 1
            ),
        )
        before = of


def _table(rows: Iterable[dict[str, Any]]) -> list[str]:
    lines = [
        "| adapters' bytes / room | policy | tokens/s | TTFT mean, ms | p50 | p99 | hits | reloads "
        "| prefetched, unused | preempted | against the row above: tokens/s, mean TTFT |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, change in changes(rows):
        of = row["median"]
        ms = [f"{of[key] * 1e3:,.1f}" for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")]
        lines.append(
            f"| {row['adapter_bytes_over_room']} | {row['policy']} | {of['output_tokens_s']:,.0f} | {' | '.join(ms)} "
            f"| {of['hit_rate']:.1%} | {of['reloads']:,.0f} | {of['prefetches']:,.0f}, {of['prefetched_unused']:,.0f} "
            f"| {of['preemptions']:,.0f} | {'' if change is None else change} |"
        )
    return lines


def page(found: dict[str, Any]) -> str:
    """residency.md."""
    rows = found["rows"]
    last = list(POLICIES)[-1]

    def mean_ttft(name: str, times: int) -> float:
        return next(
            float(row["median"]["ttft_mean_s"])
            for row in rows
            if (row["workload"], row["adapter_bytes_over_room"], row["policy"]) == (name, times, last)
        )

    lines = [
        "# Adapters that outgrow the pool, simulated",
        "",
        "Generated by `make sim-residency`; do not edit. [residency.json](residency.json) has every seed;",
        "[simulator.md](../../simulator.md) says what is modelled and what is not.",
        "",
        f"{found['adapters']} adapters of rank {found['rank']}, all-linear, on {found['model']}: "
        f"{found['adapter_pages']:,} pages. One modelled {found['gpu'].upper()}, {found['seats']} seats, prompts and "
        f"outputs {found['lengths']} tokens. {found['requests']:,} requests, the first {found['warm_up']:.0%} to warm "
        f"up; medians of {len(found['seeds'])} seeds. The load is {found['load']:.0%} of what the same machine serves "
        "when everything fits and all requests are there at once. The pool holds the KV of the load (its peak when "
        "everything fits) and a part of the adapters. Host memory holds all.",
        "",
    ]  # fmt: skip
    for name in WORKLOADS:
        lines += [
            f"## {name}",
            "",
            f"{found['requests_s'][name]:.1f} requests a second, KV of {found['kv_pages'][name]:,} pages at the peak.",
            "",
            *_table(row for row in rows if row["workload"] == name),
            "",
        ]
    lines += ["## Losses", ""]
    told = [(row, change) for row, change in changes(rows) if change is not None]
    losses = [(row, change) for row, change in told if change.is_loss]
    for row, change in losses:
        lines.append(f"- {row['workload']}, {row['adapter_bytes_over_room']} times, {row['policy']}: {change}")
    if not losses:
        lines.append(f"No addition costs more than {NEUTRAL:.0%} of tokens/s or mean TTFT in any row.")
    lines += [
        "",
        f"The worst of {len(told)} rows: tokens/s {min(change.tokens for _, change in told):+.1%}, mean TTFT "
        f"{max(change.ttft for _, change in told):+.1%}. The best: {max(change.tokens for _, change in told):+.1%} and "
        f"{min(change.ttft for _, change in told):+.1%}.",
        "",
        "## Twice as many adapters as fit",
        "",
    ]
    for name in WORKLOADS:
        one, two = mean_ttft(name, 1), mean_ttft(name, 2)
        lines.append(f"- {name}, {last}: mean TTFT {two * 1e3:.1f} ms, {two / one:.2f} times that of all-fits")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="of each simulation")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs/benchmarks/sim")
    options = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:
        found = study(options.requests, pool)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "residency.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (options.out / "residency.md").write_text(page(found), "utf-8")
    print(f"{len(found['rows']) * len(SEEDS)} simulations in {time.perf_counter() - began:.0f} s; see {options.out}")


if __name__ == "__main__":
    main()
