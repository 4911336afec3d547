"""The paged LoRA kernels on this GPU at the shapes of two models: alone, and among a layer's base products.

    python -m bench.kernels [--json FILE] [--only TEXT]

Random bf16 weights on scattered pages of a pool of 32 layers, rows of the batch in random order; a CUDA graph of all
layers, replayed. Figures are microseconds per layer, medians. "Floor" is the time that the bytes of the distinct
adapters and of the rows' activations take at 4.3 TB/s; "in situ" is what LoRA adds to a graph of the base products.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from interleaf.core import GROUP_MODULES, LoraGroup, Module, ModuleSpan, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels import PooledAdapter, build_work, lora_add

LAYERS = 32
BYTES_PER_US = 4.3e6
REPLAYS = 20
DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Model:
    """Widths of one decoder layer, and its pages of 16 tokens."""

    hidden: int
    kv: int
    mlp: int
    tile: int = 128

    @property
    def lane_elems(self) -> int:
        return 2 * 16 * self.kv

    def into(self, group: LoraGroup) -> int:
        return self.mlp if group is LoraGroup.DOWN else self.hidden

    def out_of(self, module: Module) -> int:
        if module in (Module.K, Module.V):
            return self.kv
        return self.mlp if module in (Module.GATE, Module.UP) else self.hidden

    def columns(self, group: LoraGroup) -> int:
        return sum(self.out_of(m) for m in GROUP_MODULES[group])


LLAMA3_8B, LLAMA2_7B = Model(4096, 1024, 14336), Model(4096, 4096, 11008)
ALL, QKVO = tuple(Module), (Module.Q, Module.K, Module.V, Module.O)


@dataclass(frozen=True)
class Case:
    """`adapters` among `rows`; ranks go round. `popularity`: rows of each adapter, else as equal as can be."""

    name: str
    model: Model
    rows: int
    adapters: int
    ranks: tuple[int, ...] = (16,)
    targets: tuple[Module, ...] = ALL
    popularity: tuple[int, ...] = ()

    def counts(self) -> list[int]:
        if self.popularity:
            return list(self.popularity)
        return [self.rows // self.adapters + (i < self.rows % self.adapters) for i in range(self.adapters)]


def zipf(rows: int, adapters: int) -> tuple[int, ...]:
    """Rows of each of so many adapters, in proportion to 1 / place; at least one each."""
    whole = sum(1 / i for i in range(1, adapters + 1))
    counts = [max(1, int((rows - adapters) / i / whole) + 1) for i in range(1, adapters + 1)]
    counts[0] += rows - sum(counts)
    return tuple(counts)


CASES = [
    *(Case(f"8B r16 all T=256 D={d}", LLAMA3_8B, 256, d) for d in (1, 8, 32, 64, 128, 256)),
    Case("8B r16 all T=64 D=64", LLAMA3_8B, 64, 64),
    Case("8B r16 all T=16 D=16", LLAMA3_8B, 16, 16),
    Case("8B r16 all T=256 D=100 zipf", LLAMA3_8B, 256, 100, popularity=zipf(256, 100)),
    *(Case(f"7B r8-64 qkvo T=256 D={d}", LLAMA2_7B, 256, d, (64, 32, 16, 8), QKVO) for d in (1, 32, 128, 256)),
    Case("7B r8 qkvo T=256 D=256", LLAMA2_7B, 256, 256, (8,), QKVO),
    Case("8B r16 all prefill T=4096 D=16", LLAMA3_8B, 4096, 16),
    Case("7B r8-64 qkvo prefill T=4096 D=16", LLAMA2_7B, 4096, 16, (64, 32, 16, 8), QKVO),
]


def lay_out(model: Model, rank: int, targets: tuple[Module, ...]) -> StreamLayout:
    spans, at = [], 0
    for group, modules in GROUP_MODULES.items():
        mine = [m for m in modules if m in targets]
        b_first = at + rank * model.into(group) * len(mine)
        for m in mine:
            column = sum(model.out_of(other) for other in modules[: modules.index(m)])
            spans.append(ModuleSpan(m, rank, model.into(group), model.out_of(m), at, b_first, column))
            at, b_first = at + rank * model.into(group), b_first + rank * model.out_of(m)
        at = b_first
    return StreamLayout(tuple(spans), at, StreamOrder.TILES, model.tile)


def median_us(step: Callable[[], None]) -> float:
    """Microseconds of a replay of `step` as a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3


class Bench:
    """Memory that all cases share."""

    def __init__(self, pool_bytes: int) -> None:
        self.random = torch.Generator().manual_seed(0)
        flat = torch.empty(pool_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        for part in flat.split(2**30):
            part.uniform_(-0.02, 0.02)
        self._flat = flat
        self._base: dict[tuple[int, int], list[torch.Tensor]] = {}

    def work_of(self, case: Case) -> tuple[torch.Tensor, Callable[[LoraGroup, int, torch.Tensor, torch.Tensor], None]]:
        """The pool, and a call of the op for one group and layer."""
        model = case.model
        page = (LAYERS, 2, 16, model.kv // 128, 128)
        per_page = LAYERS * model.lane_elems
        num_pages = self._flat.numel() // per_page
        pool = self._flat[: num_pages * per_page].view(num_pages, *page)
        free = torch.randperm(num_pages, generator=self.random).tolist()
        adapters = []
        for i in range(case.adapters):
            stream = lay_out(model, case.ranks[i % len(case.ranks)], case.targets)
            count = -(-stream.elems // model.lane_elems)
            layout = PooledLayout((stream,), (0,) * LAYERS, count, 0)
            pages = [free.pop() for _ in range(count)]
            adapters.append(PooledAdapter(layout, pages, num_layers=LAYERS, lane_elems=model.lane_elems, device=DEVICE))
        owners = [a for a, n in zip(adapters, case.counts(), strict=True) for _ in range(n)]
        if case.rows <= 1024:  # decode: seats in any order; a chunk's rows are neighbours
            owners = [owners[i] for i in torch.randperm(len(owners), generator=self.random).tolist()]
        work = build_work([(a, t, 1) for t, a in enumerate(owners)])
        assert work is not None
        return pool, lambda group, layer, x, y: lora_add(x, y, pool, work, group, layer)

    def activations(self, case: Case) -> dict[LoraGroup, tuple[torch.Tensor, torch.Tensor]]:
        made = {}
        for group, modules in GROUP_MODULES.items():
            if set(modules) & set(case.targets):
                sizes = case.model.into(group), case.model.columns(group)
                made[group] = tuple(torch.randn(case.rows, n, device=DEVICE, dtype=torch.bfloat16) for n in sizes)
        return made

    def alone(self, case: Case) -> float:
        _, add = self.work_of(case)
        activations = self.activations(case)

        def step() -> None:
            for layer in range(LAYERS):
                for group, (x, y) in activations.items():
                    add(group, layer, x, y)

        return median_us(step) / LAYERS

    def in_situ(self, case: Case) -> tuple[float, float]:
        """The base products of a layer, and what LoRA adds to them."""
        _, add = self.work_of(case)
        activations = self.activations(case)
        bases = {
            g: [torch.randn(x.shape[1], y.shape[1], device=DEVICE, dtype=torch.bfloat16) * 0.02 for _ in range(4)]
            for g, (x, y) in activations.items()
        }

        def step(lora: bool) -> None:
            for layer in range(LAYERS):
                for group, (x, y) in activations.items():
                    torch.mm(x, bases[group][layer % 4], out=y)
                    if lora:
                        add(group, layer, x, y)

        base = median_us(lambda: step(False)) / LAYERS
        return base, median_us(lambda: step(True)) / LAYERS - base


def floor_us(case: Case) -> float:
    model, itemsize = case.model, 2
    elems = 0
    for i in range(case.adapters):
        rank = case.ranks[i % len(case.ranks)]
        elems += lay_out(model, rank, case.targets).elems
    for group, modules in GROUP_MODULES.items():
        mine = [m for m in modules if m in case.targets]
        if mine:
            elems += case.rows * (model.into(group) + 2 * sum(model.out_of(m) for m in mine))
    return elems * itemsize / BYTES_PER_US


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures to this file too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-base", action="store_true", help="alone only")
    args = parser.parse_args()
    bench = Bench(26 * 2**30)
    out = []
    with torch.inference_mode():
        for case in CASES:
            if args.only not in case.name:
                continue
            floor, alone = floor_us(case), bench.alone(case)
            base, added = (0.0, 0.0) if args.no_base else bench.in_situ(case)
            out.append({"case": asdict(case), "floor": floor, "alone": alone, "base": base, "in_situ": added})
            print(f"{case.name}: {alone:.1f}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            json.dump({**about, "cases": out}, file, indent=1)
    print("\n| case | floor | alone | of the floor's rate | base | in situ |\n|---|---|---|---|---|---|")
    for row in out:
        share = row["floor"] / row["alone"]
        print(
            f"| {row['case']['name']} | {row['floor']:.0f} | {row['alone']:.1f} | {share:.0%} "
            f"| {row['base']:.0f} | +{row['in_situ']:.1f} |"
        )


if __name__ == "__main__":
    main()
