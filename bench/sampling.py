"""The sampler on this GPU: a choice of one token for each row of bf16 logits.

    python -m bench.sampling [--vocab N] [--sweep]

A CUDA graph of one call, replayed; the eager path, which has none, by events around calls. Microseconds, medians.
"Read" is the time that one pass over the logits takes at 4.3 TB/s; those of few rows are in the L2 cache, as they are
when the last product has just written them. "Flat" rows keep more tokens than the list of the largest holds.
`--sweep` tries other block and list sizes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import pairwise, product

import torch

from interleaf.core import SamplingParams
from interleaf.engine.device_sampler import DeviceSampler, SamplingKind
from interleaf.kernels import token_choice

DEVICE = torch.device("cuda:0")
BYTES_PER_US = 4.3e6
REPLAYS = 20
ROWS = (1, 16, 64, 256, 1024)
CASES = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "all three": SamplingParams(temperature=0.8, top_k=200, top_p=0.95, min_p=0.01),
    "top_p 0.9, flat": SamplingParams(temperature=8.0, top_p=0.9),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.1),
    "logprobs 5": SamplingParams(temperature=0, logprobs=5),
}


def replayed_us(run: Callable[[], object], *, graph: bool) -> float:
    """Median microseconds of a call, captured or not."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3


def choice_us(logits: torch.Tensor, params: SamplingParams) -> float:
    """Microseconds that it takes to sample every row with the same parameters."""
    rows, vocab = logits.shape
    sampler = DeviceSampler(rows, vocab, DEVICE, rows)
    for seat in range(rows):
        sampler.start(seat, params, seat, range(1, 100), 50, ())
    sampler.flush()
    seats, host = torch.arange(rows, device=DEVICE), list(range(rows))
    kind = sampler.kind(host)
    if kind is SamplingKind.OUTSIDE:
        return replayed_us(lambda: sampler.sample_outside(logits, host, seats), graph=False)
    return replayed_us(lambda: sampler.choose(logits, seats, kind), graph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=128_256, help="tokens of the vocabulary")
    parser.add_argument("--sweep", action="store_true", help="other block and list sizes, at 256 and 1024 rows")
    args = parser.parse_args()
    sizes = product((2048, 4096, 8192), (1024, 2048)) if args.sweep else [(token_choice._BLOCK, token_choice._NEAR)]
    for token_choice._BLOCK, token_choice._NEAR in sizes:
        print(f"blocks of {token_choice._BLOCK}, lists of {token_choice._NEAR}")
        for rows in ROWS[3:] if args.sweep else ROWS:
            logits = (torch.randn(rows, args.vocab, device=DEVICE) * 3).bfloat16()
            read = logits.nbytes / BYTES_PER_US
            times = ", ".join(f"{name} {choice_us(logits, params):.0f}" for name, params in CASES.items())
            print(f"  {rows} rows (read {read:.0f}): {times}", flush=True)


if __name__ == "__main__":
    main()
