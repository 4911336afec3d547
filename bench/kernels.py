"""The paged LoRA kernels on this GPU at the shapes of two models: alone, and among a layer's base products.

    python -m bench.kernels [--json FILE] [--only TEXT] [--no-base] [--steps]

Random bf16 weights on scattered pages of a pool of 32 layers, rows of the batch in random order; a CUDA graph of all
layers, replayed. Figures are microseconds per layer, medians. "Floor" is the time that the bytes of the distinct
adapters and of the rows' activations take at 4.3 TB/s; "in situ" is what LoRA adds to a graph of the base products.

`--steps`: what a decode step costs whose composition has just changed. "Plan" and "upload" are host time, "resolve" the
device's for the copy and the kernel, microseconds per step. "Fitted" is LoRA alone with launches as large as the step
needs; "mould" with those that a captured graph has, of which "spare" are programs without rows. Then each scheme that
the mould could have had, with what schemes.py expects of it in brackets: its constants are fitted to these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from interleaf.core import GROUP_MODULES, LoraGroup, Module, ModuleSpan, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels import DeviceLora, LoraStep, lora_add
from interleaf.kernels.moulds import Mould, Moulds
from interleaf.kernels.schemes import Demand, SchemeTable

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
    Case("7B r8 qkvo T=256 D=200 zipf", LLAMA2_7B, 256, 200, (8,), QKVO, zipf(256, 200)),
    Case("8B r16 all T=1024 D=300 zipf", LLAMA3_8B, 1024, 300, popularity=zipf(1024, 300)),
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


@dataclass(frozen=True)
class StepFigures:
    """See the top of this file."""

    plan: float
    upload: float
    resolve: float
    fitted: float
    mould: float
    spare: float
    schemes: list[tuple[float, float]]


class Forced(Moulds):
    """Takes one scheme, fitted to the step."""

    def __init__(self, scheme: int) -> None:
        super().__init__()
        self._scheme = scheme

    def choose(self, demand: Demand, table: SchemeTable) -> Mould:
        return Mould(self._scheme, demand.records[self._scheme])


class Bench:
    """Memory that all cases share."""

    def __init__(self, pool_bytes: int) -> None:
        self.random = torch.Generator().manual_seed(0)
        flat = torch.empty(pool_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        for part in flat.split(2**30):
            part.uniform_(-0.02, 0.02)
        self._flat = flat
        self._base: dict[tuple[int, int], list[torch.Tensor]] = {}

    def pool_of(self, case: Case) -> torch.Tensor:
        per_page = LAYERS * case.model.lane_elems
        num_pages = self._flat.numel() // per_page
        return self._flat[: num_pages * per_page].view(num_pages, LAYERS, 2, 16, case.model.kv // 128, 128)

    def book_of(self, case: Case) -> DeviceLora:
        """The adapters of a case on pages drawn at random."""
        model = case.model
        free = torch.randperm(len(self.pool_of(case)), generator=self.random).tolist()
        book = DeviceLora(num_layers=LAYERS, lane_elems=model.lane_elems, max_rows=1024, device=DEVICE)
        for i in range(case.adapters):
            stream = lay_out(model, case.ranks[i % len(case.ranks)], case.targets)
            count = -(-stream.elems // model.lane_elems)
            book.add(i, PooledLayout((stream,), (0,) * LAYERS, count, 0), [free.pop() for _ in range(count)])
        return book

    def rows_of(self, case: Case) -> list[tuple[int, int, int]]:
        owners = [i for i, n in enumerate(case.counts()) for _ in range(n)]
        if case.rows <= 1024:  # decode: seats in any order; a chunk's rows are neighbours
            owners = [owners[i] for i in torch.randperm(len(owners), generator=self.random).tolist()]
        return [(uid, t, 1) for t, uid in enumerate(owners)]

    def work_of(self, case: Case) -> Callable[[LoraGroup, int, torch.Tensor, torch.Tensor], None]:
        """A call of the op for one group and layer, its launches as large as the step needs."""
        return self._uploaded(case, self.book_of(case).plan(self.rows_of(case), graph=False))

    def _uploaded(
        self, case: Case, step: LoraStep | None
    ) -> Callable[[LoraGroup, int, torch.Tensor, torch.Tensor], None]:
        assert step is not None
        step.upload()
        pool, work = self.pool_of(case), step.work
        return lambda group, layer, x, y: lora_add(x, y, pool, work, group, layer)

    def activations(self, case: Case) -> dict[LoraGroup, tuple[torch.Tensor, torch.Tensor]]:
        made = {}
        for group, modules in GROUP_MODULES.items():
            if set(modules) & set(case.targets):
                sizes = case.model.into(group), case.model.columns(group)
                made[group] = tuple(torch.randn(case.rows, n, device=DEVICE, dtype=torch.bfloat16) for n in sizes)
        return made

    def alone(self, case: Case) -> float:
        return self._alone(case, self.work_of(case))

    def _alone(self, case: Case, add: Callable[[LoraGroup, int, torch.Tensor, torch.Tensor], None]) -> float:
        activations = self.activations(case)

        def step() -> None:
            for layer in range(LAYERS):
                for group, (x, y) in activations.items():
                    add(group, layer, x, y)

        return median_us(step) / LAYERS

    def steps(self, case: Case) -> StepFigures:
        book = self.book_of(case)
        plans, uploads, resolves = [], [], []
        for _ in range(REPLAYS):
            rows = self.rows_of(case)
            began = time.perf_counter()
            step = book.plan(rows, graph=True)
            plans.append(time.perf_counter() - began)
            assert step is not None
            torch.cuda._sleep(4_000_000)  # the device is busy until all is enqueued: no gap of the host's is timed
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            began = time.perf_counter()
            step.upload()
            uploads.append(time.perf_counter() - began)
            marks[1].record()
            torch.cuda.synchronize()
            resolves.append(marks[0].elapsed_time(marks[1]) * 1e3)
        tasks = step._table.tasks
        spare = tasks[tasks[:, 6] == 0, 1].sum() / max(1, tasks[:, 1].sum())
        mould = self._alone(case, self._uploaded(case, step))
        fitted = self._alone(case, self._uploaded(case, book.plan(rows, graph=False)))
        schemes = []
        table = book._scheme_table(1 << (case.rows - 1).bit_length())
        members, _ = book._residents.members(rows)
        assert members is not None
        demand = table.demand(members.layouts, members.counts)
        for scheme in range(len(table.schemes)):
            book._families[table.identity].moulds = Forced(scheme)
            book._latest.clear()
            figure = self._alone(case, self._uploaded(case, book.plan(rows, graph=True)))
            schemes.append((figure, demand.floor + float(demand.cost[scheme])))
        us = [statistics.median(t[3:]) for t in (plans, uploads, resolves)]
        return StepFigures(us[0] * 1e6, us[1] * 1e6, us[2], fitted, mould, float(spare), schemes)

    def in_situ(self, case: Case) -> tuple[float, float]:
        """The base products of a layer, and what LoRA adds to them."""
        add = self.work_of(case)
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


def print_steps(bench: Bench, only: str) -> None:
    print("| case | plan | upload | resolve | fitted | mould | spare | singles, runs of 2, 4, 8, 16, long |")
    print("|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for case in CASES:
            if only in case.name and case.rows <= 1024:
                f = bench.steps(case)
                schemes = ", ".join(f"{us:.1f} ({expected:.0f})" for us, expected in f.schemes)
                print(
                    f"| {case.name} | {f.plan:.0f} | {f.upload:.0f} | {f.resolve:.1f} | {f.fitted:.1f} | {f.mould:.1f} "
                    f"| {f.spare:.0%} | {schemes} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures to this file too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-base", action="store_true", help="alone only")
    parser.add_argument("--steps", action="store_true", help="what steps cost whose composition changes")
    args = parser.parse_args()
    bench = Bench(26 * 2**30)
    if args.steps:
        print_steps(bench, args.only)
        return
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
