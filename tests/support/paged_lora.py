"""A pool of adapters in the order of a GPU, beside the float32 loop over rows that says what the LoRA op means.

On a CUDA device the op runs as an engine runs it. Without one, under Triton's interpreter, the same kernels and records
run on CPU tensors.
"""

import os
from dataclasses import dataclass

import torch

from interleaf.core import (
    GROUP_MODULES,
    LoraGroup,
    Module,
    ModuleSpan,
    PooledLayout,
    StreamLayout,
    StreamOrder,
)
from interleaf.kernels import DeviceLora, LoraWork, lora_add

if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton 3.6 takes int() of one-element arrays for the bounds of loops, which NumPy 2.4 refuses.
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _with_index(tensor, scope):
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_index

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ALL = tuple(Module)
NAN = float("nan")


@dataclass(frozen=True)
class Widths:
    hidden: int
    q: int
    kv: int
    mlp: int

    def into(self, group: LoraGroup) -> int:
        return {LoraGroup.O: self.q, LoraGroup.DOWN: self.mlp}.get(group, self.hidden)

    def out_of(self, module: Module) -> int:
        return {
            Module.Q: self.q,
            Module.K: self.kv,
            Module.V: self.kv,
            Module.GATE: self.mlp,
            Module.UP: self.mlp,
        }.get(module, self.hidden)

    def first_column(self, module: Module) -> int:
        (modules,) = (m for m in GROUP_MODULES.values() if module in m)
        return sum(self.out_of(m) for m in modules[: modules.index(module)])

    def columns(self, group: LoraGroup) -> int:
        return sum(self.out_of(m) for m in GROUP_MODULES[group])


def lay_out(ranks: dict[Module, int], widths: Widths, tile: int) -> StreamLayout:
    """Group after group: all A, then all B."""
    spans, at = [], 0
    for group, modules in GROUP_MODULES.items():
        mine = [m for m in modules if m in ranks]
        a_first = {}
        for m in mine:
            a_first[m] = at
            at += ranks[m] * widths.into(group)
        for m in mine:
            out = widths.out_of(m)
            spans.append(ModuleSpan(m, ranks[m], widths.into(group), out, a_first[m], at, widths.first_column(m)))
            at += ranks[m] * out
    return StreamLayout(tuple(spans), at, StreamOrder.TILES, tile)


def tiled(matrix: torch.Tensor, block: int, tile: int) -> torch.Tensor:
    """A matrix in blocks of rows, each column of tiles after column of tiles: written out place by place."""
    rows, width = matrix.shape
    i, k = torch.arange(rows).view(-1, 1), torch.arange(width)
    height = torch.minimum(torch.tensor(block), rows - i // block * block)
    place = i // block * block * width + k // tile * height * tile + i % block * tile + k % tile
    out = torch.full((rows * width,), NAN, dtype=matrix.dtype)
    out[place.flatten()] = matrix.flatten()
    return out


@dataclass
class Adapter:
    weights: list  # per layer: {module: (A [r, in], B [out, r])}
    pages: list
    layout: PooledLayout


class Pool:
    """A pool that is NaN but for the adapters put into it, on pages drawn at random."""

    def __init__(self, widths, shape, num_pages, tile, dtype=torch.float32, seed=0, free=None):
        """`shape`: (layers, 2, page_tokens, kv_heads, head_dim)."""
        self.random = torch.Generator().manual_seed(seed)
        self.widths, self.tile, self.layers = widths, tile, shape[0]
        self.data = torch.full((num_pages, *shape), NAN, dtype=dtype, device=DEVICE)
        self.lane_elems = self.data[0, 0].numel()
        self.free = torch.randperm(num_pages, generator=self.random).tolist() if free is None else list(free)

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.data.dtype)

    def put(self, ranks_of_layer) -> Adapter:
        """`ranks_of_layer`: for each layer {module: rank}, or None."""
        distinct = [r for i, r in enumerate(ranks_of_layer) if r is not None and r not in ranks_of_layer[:i]]
        layouts = tuple(lay_out(r, self.widths, self.tile) for r in distinct)
        count = max(-(-s.elems // self.lane_elems) for s in layouts)
        pages = [self.free.pop() for _ in range(count)]
        index = tuple(None if r is None else distinct.index(r) for r in ranks_of_layer)
        weights = []
        for layer, i in enumerate(index):
            weights.append({})
            if i is None:
                continue
            stream = torch.full((count * self.lane_elems,), NAN, dtype=self.data.dtype)
            for group in LoraGroup:
                spans = layouts[i].group(group)
                for s in spans:
                    a = self.rand(s.rank, s.in_features) / s.in_features**0.5
                    weights[layer][s.module] = (a, self.rand(s.out_features, s.rank))
                    b = tiled(weights[layer][s.module][1].t(), s.rank, self.tile)
                    stream[s.b_first : s.b_first + b.numel()] = b
                if spans:
                    a = tiled(torch.cat([weights[layer][s.module][0] for s in spans]), 16, self.tile)
                    stream[spans[0].a_first : spans[0].a_first + a.numel()] = a
            for page, lane in zip(pages, stream.split(self.lane_elems), strict=True):
                self.data[page, layer] = lane.view(self.data.shape[2:]).to(DEVICE)
        return Adapter(weights, pages, PooledLayout(layouts, index, count, 0))

    def all_ranks(self, rank, modules=ALL) -> Adapter:
        return self.put([dict.fromkeys(modules, rank)] * self.layers)

    def book(self, max_rows=64) -> DeviceLora:
        return DeviceLora(num_layers=self.layers, lane_elems=self.lane_elems, max_rows=max_rows, device=DEVICE)

    def work(self, rows) -> LoraWork | None:
        """The work of a batch of any size; `rows`: the adapter, or None, of each row."""
        book = self.book()
        for adapter in {id(a): a for a in rows if a}.values():
            book.add(id(adapter), adapter.layout, adapter.pages)
        step = book.plan(segments(rows), graph=False)
        if step is None:
            return None
        step.upload()
        return step.work

    def inputs(self, group, num_rows):
        """x, y and y's copy."""
        x, y = self.rand(num_rows, self.widths.into(group)), self.rand(num_rows, self.widths.columns(group))
        return x.to(DEVICE), y.clone().to(DEVICE), y.to(DEVICE)

    def expected(self, rows, group, layer, x, y):
        x, out = x.cpu().float(), y.cpu().float().clone()
        for t, adapter in enumerate(rows):
            for module, (a, b) in (adapter.weights[layer] if adapter else {}).items():
                if module in GROUP_MODULES[group]:
                    at = self.widths.first_column(module)
                    out[t, at : at + self.widths.out_of(module)] += b.float() @ (a.float() @ x[t])
        return out

    def touched(self, adapter, group, layer):
        """Columns of y that an adapter's rows may change."""
        mask = torch.zeros(self.widths.columns(group), dtype=torch.bool)
        for module in adapter.weights[layer] if adapter else ():
            if module in GROUP_MODULES[group]:
                at = self.widths.first_column(module)
                mask[at : at + self.widths.out_of(module)] = True
        return mask

    def check(self, rows, groups=tuple(LoraGroup), layers=None, tolerance=2e-5):
        """The op against the loop; what is no adapter's is bit-equal. The error is relative to the update's size."""
        work = self.work(rows)
        for group in groups:
            for layer in range(self.layers) if layers is None else layers:
                x, y, before = self.inputs(group, len(rows))
                if work is not None:
                    lora_add(x, y, self.data, work, group, layer)
                y, before = y.cpu(), before.cpu()
                want = self.expected(rows, group, layer, x, before)
                update = (want - before.float()).norm()
                error = (y.float() - want).norm()
                assert error <= tolerance * (update + want.norm()), f"{group} layer {layer}: {error} of {update}"
                for t, adapter in enumerate(rows):
                    rest = ~self.touched(adapter, group, layer)
                    assert torch.equal(y[t, rest], before[t, rest])


def segments(rows):
    """One of each row."""
    return [(id(a) if a else None, t, 1) for t, a in enumerate(rows)]


def popularity(kind, adapters, num_rows, random):
    if kind == "identical":
        return [adapters[0]] * num_rows
    if kind == "distinct":
        return [adapters[t % len(adapters)] for t in range(num_rows)]
    if kind == "zipf":
        weights = 1 / torch.arange(1, len(adapters) + 1)
        return [adapters[i] for i in torch.multinomial(weights, num_rows, True, generator=random).tolist()]
    choice = torch.randint(len(adapters) + 1, (num_rows,), generator=random).tolist()
    return [([*adapters, None])[i] for i in choice]
