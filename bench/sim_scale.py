"""A million requests through the simulator: how long the engine's own planning takes, with nothing to compute.

    python -m bench.sim_scale [--requests N] [--json PATH]

10,000 adapters of rank 16 on Llama-3-8B, Zipf 1, 85 tokens in and 165 out in the mean, 256 seats, one H200, at nearly
the load that it can serve. Times are of one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict
from pathlib import Path

from interleaf.sim.hardware import find_gpu
from interleaf.sim.report import as_text, figures
from interleaf.sim.shapes import model_shape
from interleaf.sim.simulate import simulate
from interleaf.sim.workload import draw
from interleaf.sim.world import Settings, build_world

NUM_ADAPTERS = 10_000
RATE = 124.0
"""Requests a second: nearly what the modelled machine can serve; 170 sequences run in the mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    began, cpu = time.perf_counter(), time.process_time()
    shape = model_shape("llama3-8b")
    workload = draw(
        num_requests=options.requests,
        num_adapters=NUM_ADAPTERS,
        arrivals=f"poisson:{options.rate}",
        popularity="zipf:1",
        prompt="lognormal:85",
        output="lognormal:165",
        seed=0,
    )
    world = build_world(
        workload,
        model=shape,
        gpu=find_gpu("h200"),
        adapters=[shape.adapter(16)] * NUM_ADAPTERS,
        settings=Settings(max_num_seqs=256),
    )
    found = figures(simulate(world, workload), workload)
    real_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    tokens = int(workload.output_tokens.sum())
    print(as_text(found))
    print(
        f"\n{real_s:.0f} s of real time, {cpu_s:.0f} s of CPU: {cpu_s / found.steps * 1e6:.0f} us a step, "
        f"{cpu_s / tokens * 1e6:.2f} us a token; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )
    if options.json:
        options.json.write_text(
            json.dumps(asdict(found) | {"real_s": real_s, "cpu_s": cpu_s}, indent=2) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
