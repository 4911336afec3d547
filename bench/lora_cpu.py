"""The LoRA op on this CPU beside a plain loop over adapters, in one process and in alternation. Reports ratios.

    python -m bench.lora_cpu [--threads N] [--rounds N]

SmolLM2-135M's shapes in float32, all layers of a step, random weights on scattered pages. A figure is the sum over
layers of the fastest round, so that what else the machine does hits the figures least; the weights of a step exceed the
caches. The loop is what one would write first: for each adapter and module gather A and B, two products, index_add_.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from interleaf.core import GROUP_MODULES, LoraGroup, Module, ModuleSpan, PooledLayout, StreamLayout
from interleaf.kernels import PooledAdapter, build_work, lora_add

LAYERS, HIDDEN, KV, MLP, ADAPTERS = 30, 576, 192, 1536, 8
POOL_SHAPE = (LAYERS, 2, 16, 3, 64)
LANE = 2 * 16 * 3 * 64
IN = {LoraGroup.QKV: HIDDEN, LoraGroup.O: HIDDEN, LoraGroup.GATE_UP: HIDDEN, LoraGroup.DOWN: MLP}
OUT = {
    Module.Q: HIDDEN,
    Module.K: KV,
    Module.V: KV,
    Module.O: HIDDEN,
    Module.GATE: MLP,
    Module.UP: MLP,
    Module.DOWN: HIDDEN,
}
Segments = list[tuple[int, int, int]]
"""(adapter, first row, rows)."""


def lay_out(rank: int, targets: frozenset[Module]) -> StreamLayout:
    """Group after group, all A, then all B."""
    spans, at = [], 0
    for group, modules in GROUP_MODULES.items():
        mine = [m for m in modules if m in targets]
        b_first = at + rank * IN[group] * len(mine)
        for m in mine:
            column = sum(OUT[other] for other in modules[: modules.index(m)])
            spans.append(ModuleSpan(m, rank, IN[group], OUT[m], at, b_first, column))
            at, b_first = at + rank * IN[group], b_first + rank * OUT[m]
        at = b_first
    return StreamLayout(tuple(spans), at)


class Loop:
    """The plain loop, over the same pages; its index tensors are made beforehand too."""

    def __init__(self, stream: StreamLayout, pages: torch.Tensor, segments: Segments) -> None:
        self.unit = 192
        lane = LANE // self.unit

        def rows(adapter: int, first: int, elems: int) -> torch.Tensor:
            at = torch.arange(first // self.unit, (first + elems) // self.unit)
            return pages[adapter][at // lane] * (LAYERS * lane) + at % lane

        self.jobs = {g: [] for g in LoraGroup}
        for adapter in range(ADAPTERS):
            mine = torch.tensor([t for a, first, n in segments if a == adapter for t in range(first, first + n)])
            for g in LoraGroup:
                for s in stream.group(g):
                    a, b = rows(adapter, s.a_first, s.a_elems), rows(adapter, s.b_first, s.b_elems)
                    self.jobs[g].append((mine, s, a, b))

    def add(self, x: torch.Tensor, y: torch.Tensor, pool: torch.Tensor, group: LoraGroup, layer: int) -> None:
        weights = pool.view(-1, self.unit)[layer * LANE // self.unit :]
        for mine, s, a, b in self.jobs[group]:
            low = x.index_select(0, mine) @ weights.index_select(0, a).view(s.rank, -1).t()
            update = low @ weights.index_select(0, b).view(s.rank, -1)
            y[:, s.out_first : s.out_first + s.out_features].index_add_(0, mine, update)


def fastest(steps: list[Callable[[LoraGroup, int], None]], rounds: int) -> list[float]:
    """Milliseconds of a step for each candidate: for each layer its fastest round, summed."""
    best = [[float("inf")] * LAYERS for _ in steps]
    for _ in range(rounds):
        for layer in range(LAYERS):
            for i, step in enumerate(steps):
                began = time.perf_counter()
                for group in LoraGroup:
                    step(group, layer)
                best[i][layer] = min(best[i][layer], time.perf_counter() - began)
    return [sum(b) * 1e3 for b in best]


def case(name: str, rank: int, targets: frozenset[Module], segments: Segments, dtype: torch.dtype, rounds: int) -> None:
    """Measure one batch and print a line of the table."""
    stream = lay_out(rank, targets)
    count = -(-stream.elems // LANE)
    pool = torch.empty(ADAPTERS * count + 16, *POOL_SHAPE).normal_(0, 0.02).to(dtype)
    pages = torch.randperm(len(pool))[: ADAPTERS * count].view(ADAPTERS, count)
    layout = PooledLayout((stream,), (0,) * LAYERS, count, stream.elems * LAYERS * dtype.itemsize)
    adapters = [PooledAdapter(layout, p.tolist(), num_layers=LAYERS, lane_elems=LANE) for p in pages]
    resolved = [(adapters[a], first, n) for a, first, n in segments]
    building = min(_timed(lambda: build_work(resolved)) for _ in range(20)) * 1e3
    work, loop = build_work(resolved), Loop(stream, pages, segments)
    num_rows = segments[-1][1] + segments[-1][2]
    x = {g: torch.randn(num_rows, n).to(dtype) for g, n in IN.items()}
    y = {g: torch.zeros(num_rows, sum(OUT[m] for m in ms), dtype=dtype) for g, ms in GROUP_MODULES.items()}
    paged, plain = fastest(
        [
            lambda group, layer: lora_add(x[group], y[group], pool, work, group, layer),
            lambda group, layer: loop.add(x[group], y[group], pool, group, layer),
        ],
        rounds,
    )
    print(f"| {name} | {plain:.1f} | {paged:.1f} | {plain / paged:.2f} | {building:.2f} |", flush=True)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    every, q_v = frozenset(Module), frozenset({Module.Q, Module.V})
    decode = [(t % ADAPTERS, t, 1) for t in range(32)]
    distinct = [(t, t, 1) for t in range(ADAPTERS)]
    prefill = [(a, a * 64, 64) for a in range(ADAPTERS)]
    print(f"{args.threads} threads, ms per step of {LAYERS} layers")
    print("| batch | loop | lora_add | ratio | build_work |\n|---|---|---|---|---|")
    with torch.inference_mode():
        case("decode 32 rows, 8 adapters r=16 all-linear", 16, every, decode, torch.float32, args.rounds)
        case("decode 32 rows, 8 adapters r=8 q,v", 8, q_v, decode, torch.float32, args.rounds)
        case("decode 8 rows, 8 adapters r=16 all-linear", 16, every, distinct, torch.float32, args.rounds)
        case("prefill 512 rows, 8 adapters r=16 all-linear", 16, every, prefill, torch.float32, args.rounds // 2)
        case("prefill 512 rows, 8 adapters r=8 q,v", 8, q_v, prefill, torch.float32, args.rounds // 2)
        case("bfloat16 decode 32 rows, r=16 all-linear", 16, every, decode, torch.bfloat16, args.rounds // 3)


if __name__ == "__main__":
    main()
