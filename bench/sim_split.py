"""What one pool for adapters and KV is worth: shared, against a fixed share for adapters.

    python -m bench.sim_split [--requests N] [--processes N] [--out FILE]

Simulated, so that it repeats to the last digit: the engine's scheduler and residency on a modelled H200. Writes
memory-split.md. Two loads are those of the residency study; the third has few adapters and long prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from interleaf.sim.hardware import find_gpu
from interleaf.sim.report import figures
from interleaf.sim.shapes import model_shape
from interleaf.sim.simulate import simulate
from interleaf.sim.workload import draw
from interleaf.sim.world import Settings, build_world

MODEL, GPU, RANK, SEATS = "llama3-8b", "h200", 16, 256
LOAD, WARM_UP = 0.7, 1 / 3
SEEDS = (0, 1, 2)
CALIBRATION_SEED = 100
OVERSUBSCRIPTION = (1, 2)
SPLITS = (None, 0.1, 0.3, 0.5)
FIGURES = ("output_tokens_s", "ttft_mean_s", "ttft_p99_s", "hit_rate", "loads", "preemptions")


@dataclass(frozen=True, slots=True)
class Load:
    """A workload but for its rate."""

    adapters: int
    popularity: str
    prompt: str
    output: str


LOADS = {
    "600 adapters, uniform": Load(600, "uniform", "uniform:8-512", "uniform:8-512"),
    "600 adapters, Zipf 1": Load(600, "zipf:1", "uniform:8-512", "uniform:8-512"),
    "60 adapters, long prompts": Load(60, "zipf:1", "uniform:512-3584", "uniform:8-512"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. A rate of None: all requests are there at once. Pages of None: whatever the GPU holds."""

    load: str
    rate: float | None
    pool_pages: int | None
    split: float | None
    seed: int
    requests: int


def run(cell: Cell) -> dict[str, float]:
    """One simulation's figures."""
    load = LOADS[cell.load]
    workload = draw(
        num_requests=cell.requests,
        num_adapters=load.adapters,
        arrivals="once" if cell.rate is None else f"poisson:{cell.rate}",
        popularity=load.popularity,
        prompt=load.prompt,
        output=load.output,
        seed=cell.seed,
    )
    shape = model_shape(MODEL)
    world = build_world(
        workload,
        model=shape,
        gpu=find_gpu(GPU),
        adapters=[shape.adapter(RANK)] * load.adapters,
        settings=Settings(pool_pages=cell.pool_pages, max_num_seqs=SEATS, memory_split=cell.split),
    )
    warm_up = 0 if cell.rate is None else int(cell.requests * WARM_UP)
    found = asdict(figures(simulate(world, workload, warm_up=warm_up), workload))
    return {key: float(found[key]) for key in (*FIGURES, "requests_s", "peak_kv_pages")}


def study(num_requests: int, pool: ProcessPoolExecutor) -> Iterator[str]:
    """Calibrate each load, then every cell. Yields: the lines of the page."""
    calibration = [Cell(name, None, None, None, CALIBRATION_SEED, num_requests) for name in LOADS]
    rates = {
        cell.load: float(f"{LOAD * of['requests_s']:.4g}")
        for cell, of in zip(calibration, pool.map(run, calibration), strict=True)
    }
    fits = [replace(cell, rate=rates[cell.load], seed=seed) for cell, seed in product(calibration, SEEDS)]
    peaks = dict.fromkeys(LOADS, 0)
    for cell, of in zip(fits, pool.map(run, fits), strict=True):
        peaks[cell.load] = max(peaks[cell.load], int(of["peak_kv_pages"]))
    each = model_shape(MODEL).adapter(RANK).pages
    rows = [
        (name, times, split, peaks[name] + -(-LOADS[name].adapters * each // times))
        for name, times, split in product(LOADS, OVERSUBSCRIPTION, SPLITS)
    ]
    cells = [Cell(name, rates[name], pages, split, s, num_requests) for name, _, split, pages in rows for s in SEEDS]
    results, shared = pool.map(run, cells), 0.0
    over_shared: dict[float, list[float]] = {split: [] for split in SPLITS if split is not None}
    for name, times, split, pages in rows:
        seeds = [next(results) for _ in SEEDS]
        of = {key: statistics.median(seed[key] for seed in seeds) for key in FIGURES}
        print(name, times, split, of, file=sys.stderr)
        if times == OVERSUBSCRIPTION[0] and split is None:
            yield from _heading(name, rates[name], peaks[name], LOADS[name].adapters * each)
        if split is None:
            shared = of["ttft_mean_s"]
        else:
            over_shared[split].append(of["ttft_mean_s"] / shared)
        share = "shared" if split is None else f"{split:g}: {round(pages * split) // each} adapters"
        yield (
            f"| {times} | {pages:,} | {share} | {of['output_tokens_s']:,.0f} | {of['ttft_mean_s'] * 1e3:,.1f} "
            f"| {of['ttft_mean_s'] / shared:,.2f} | {of['ttft_p99_s'] * 1e3:,.1f} | {of['hit_rate']:.1%} "
            f"| {of['loads']:,.0f} | {of['preemptions']:,.0f} |"
        )
    yield from _summary(over_shared)


def _summary(over_shared: dict[float, list[float]]) -> Iterator[str]:
    yield from (
        "",
        "## In short",
        "",
        "Mean TTFT over that of the shared pool, the best and the worst row of each split:",
        "",
    )
    for split, ratios in over_shared.items():
        yield f"- {split:g}: {min(ratios):,.2f} to {max(ratios):,.2f}"


def _heading(name: str, rate: float, peak: int, adapter_pages: int) -> Iterator[str]:
    load = LOADS[name]
    yield from (
        "",
        f"## {name}",
        "",
        f"{rate:.1f} requests a second; prompts {load.prompt}, outputs {load.output} tokens. KV of {peak:,} pages at "
        f"the peak when everything fits, adapters of {adapter_pages:,}.",
        "",
        "| adapters' bytes / room | pool, pages | for adapters | tokens/s | TTFT mean, ms | over shared | p99, ms "
        "| hits | loads | preempted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )


def main() -> None:
    """Run the study and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/sim/memory-split.md"))
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes) as pool:
        table = list(study(given.requests, pool))
    head = [
        "# One pool, or a share for adapters: simulated",
        "",
        "Generated by `python -m bench.sim_split`; do not edit. [simulator.md](../../simulator.md) says what is",
        "modelled.",
        "",
        f"Adapters of rank {RANK}, all-linear, on {MODEL}. One modelled {GPU.upper()}, {SEATS} seats. "
        f"{given.requests:,} requests, the first {WARM_UP:.0%} to warm up; medians of {len(SEEDS)} seeds. The load is "
        f"{LOAD:.0%} of what the machine serves when everything fits and all requests are there at once. The pool "
        "holds the KV of that load (its peak when everything fits) and the adapters' bytes, or half of them. `shared`: "
        "one pool for both, as the engine has it. A number: the share of the pages that only adapters may use "
        "(`memory_split`), and how many adapters it holds.",
    ]
    given.out.write_text("\n".join([*head, *table]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
