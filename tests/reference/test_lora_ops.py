"""The LoRA op over scattered pages against float32 loops over rows, on streams assembled here from A and B."""

from dataclasses import dataclass

import pytest
import torch

from interleaf.core import GROUP_MODULES, LoraGroup, Module, ModuleSpan, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels import PooledAdapter, build_work, lora_add
from interleaf.kernels.reference import FUSED_ROWS

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
HIDDEN, Q, KV, MLP = 96, 128, 32, 160
IN = {LoraGroup.QKV: HIDDEN, LoraGroup.O: Q, LoraGroup.GATE_UP: HIDDEN, LoraGroup.DOWN: MLP}
OUT = {
    Module.Q: Q,
    Module.K: KV,
    Module.V: KV,
    Module.O: HIDDEN,
    Module.GATE: MLP,
    Module.UP: MLP,
    Module.DOWN: HIDDEN,
}
ALL = tuple(Module)
NAN = float("nan")


def first_column(group, module):
    modules = GROUP_MODULES[group]
    return sum(OUT[m] for m in modules[: modules.index(module)])


def lay_out(ranks):
    """A StreamLayout for {module: rank}: group after group, all A, then all B."""
    spans, at = [], 0
    for group, modules in GROUP_MODULES.items():
        mine = [m for m in modules if m in ranks]
        a_first = {}
        for m in mine:
            a_first[m] = at
            at += ranks[m] * IN[group]
        for m in mine:
            spans.append(ModuleSpan(m, ranks[m], IN[group], OUT[m], a_first[m], at, first_column(group, m)))
            at += ranks[m] * OUT[m]
    return StreamLayout(tuple(spans), at)


@dataclass
class Adapter:
    weights: list  # per layer: {module: (A [r, in], B [out, r])}
    pages: list
    pooled: PooledAdapter


class Pool:
    """A pool that is NaN but for the adapters put into it, on pages drawn at random."""

    def __init__(self, page_tokens=4, dtype=torch.float32, num_pages=1200, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.data = torch.full((num_pages, LAYERS, 2, page_tokens, KV_HEADS, HEAD_DIM), NAN, dtype=dtype)
        self.lane_elems = 2 * page_tokens * KV_HEADS * HEAD_DIM
        self.free = torch.randperm(num_pages, generator=self.random).tolist()

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.data.dtype)

    def put(self, ranks_of_layer):
        """`ranks_of_layer`: for each layer {module: rank}, or None."""
        distinct = [r for i, r in enumerate(ranks_of_layer) if r is not None and r not in ranks_of_layer[:i]]
        layouts = tuple(lay_out(r) for r in distinct)
        count = max(-(-s.elems // self.lane_elems) for s in layouts)
        pages = [self.free.pop() for _ in range(count)]
        index = tuple(None if r is None else distinct.index(r) for r in ranks_of_layer)
        weights = []
        for layer, i in enumerate(index):
            weights.append({})
            if i is None:
                continue
            stream = torch.full((count * self.lane_elems,), NAN, dtype=self.data.dtype)
            for s in layouts[i].spans:
                a, b = self.rand(s.rank, s.in_features), self.rand(s.out_features, s.rank) / 8
                weights[layer][s.module] = (a, b)
                stream[s.a_first : s.a_first + a.numel()] = a.flatten()
                stream[s.b_first : s.b_first + b.numel()] = b.t().flatten()
            for page, lane in zip(pages, stream.split(self.lane_elems), strict=True):
                self.data[page, layer] = lane.view(self.data.shape[2:])
        layout = PooledLayout(layouts, index, count, sum(s.elems for s in layouts) * self.data.element_size())
        pooled = PooledAdapter(layout, pages, num_layers=LAYERS, lane_elems=self.lane_elems)
        return Adapter(weights, pages, pooled)


def run(pool, rows, group, layer, x, y):
    """`rows`: the adapter, or None, of each row; one segment per row."""
    work = build_work([(a.pooled if a else None, t, 1) for t, a in enumerate(rows)])
    if work is not None:
        lora_add(x, y, pool.data, work, group, layer)
    return work


def expected(rows, group, layer, x, y):
    out = y.float().clone()
    for t, adapter in enumerate(rows):
        for module, (a, b) in (adapter.weights[layer] if adapter else {}).items():
            if module in GROUP_MODULES[group]:
                at = first_column(group, module)
                out[t, at : at + OUT[module]] += b.float() @ (a.float() @ x[t].float())
    return out


def inputs(pool, group, num_rows):
    return pool.rand(num_rows, IN[group]), pool.rand(num_rows, sum(OUT[m] for m in GROUP_MODULES[group]))


def check(pool, rows, groups=tuple(LoraGroup), layers=range(LAYERS), atol=2e-4):
    for group in groups:
        for layer in layers:
            x, y = inputs(pool, group, len(rows))
            before, want = y.clone(), expected(rows, group, layer, x, y)
            run(pool, rows, group, layer, x, y)
            torch.testing.assert_close(y.float(), want, atol=atol, rtol=atol)
            for t, adapter in enumerate(rows):
                touched = torch.zeros(y.shape[1], dtype=torch.bool)
                for module in adapter.weights[layer] if adapter else ():
                    if module in GROUP_MODULES[group]:
                        at = first_column(group, module)
                        touched[at : at + OUT[module]] = True
                assert torch.equal(y[t, ~touched], before[t, ~touched])


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


@pytest.mark.parametrize("ranks", [[8], [1, 16], [3, 8, 64]], ids=str)
@pytest.mark.parametrize("kind", ["identical", "distinct", "zipf", "some base"])
def test_every_row_gets_its_own_adapter(kind, ranks):
    pool = Pool()
    adapters = [pool.put([dict.fromkeys(ALL, ranks[i % len(ranks)])] * LAYERS) for i in range(5)]
    for num_rows in (1, 7, 33):
        check(pool, popularity(kind, adapters, num_rows, pool.random), layers=[num_rows % LAYERS])


@pytest.mark.parametrize("num_rows", [1, FUSED_ROWS, FUSED_ROWS + 1, 61])
def test_few_and_many_rows_of_one_adapter_agree_with_the_loop(num_rows):
    pool = Pool()
    a, b = (pool.put([dict.fromkeys(ALL, r)] * LAYERS) for r in (8, 3))
    check(pool, [a] * num_rows)
    check(pool, [a, None, b] * num_rows, layers=[1])


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64])
def test_any_page_size_will_do(page_tokens):
    pool = Pool(page_tokens)
    adapters = [pool.put([dict.fromkeys(ALL, r)] * LAYERS) for r in (1, 5)]
    check(pool, [adapters[0], None, adapters[1], adapters[0], *[adapters[1]] * 9], layers=[2])


@pytest.mark.parametrize(
    "targets",
    [(Module.Q, Module.V), (Module.K,), (Module.O, Module.DOWN), (Module.UP,), (Module.Q, Module.GATE, Module.UP)],
    ids="+".join,
)
def test_only_targeted_modules_change(targets):
    pool = Pool()
    some, every = pool.put([dict.fromkeys(targets, 8)] * LAYERS), pool.put([dict.fromkeys(ALL, 8)] * LAYERS)
    check(pool, [some, every, None, some, some], layers=[0])
    check(pool, [some] * 3, layers=[1])
    check(pool, [some] * 20 + [every] * 20, layers=[2])


def test_ranks_may_differ_between_modules_and_layers_and_layers_may_be_untouched():
    pool = Pool()
    mixed = {Module.Q: 8, Module.K: 2, Module.V: 8, Module.UP: 5, Module.DOWN: 16}
    a = pool.put([mixed, None, dict.fromkeys(ALL, 4)])
    b = pool.put([None, mixed, {Module.O: 33}])
    c = pool.put([dict.fromkeys(ALL, 8)] * LAYERS)
    check(pool, [a, b, None, c, b, a, a])
    check(pool, [a] * 11 + [b] * 3 + [c] * 12)


def test_work_is_none_without_adapters_and_empty_for_groups_that_nobody_targets():
    pool = Pool()
    adapter = pool.put([{Module.Q: 4}, None, {Module.Q: 4}])
    assert build_work([(None, 0, 5)]) is None
    assert build_work([]) is None
    assert build_work([(adapter.pooled, 0, 0)]) is None
    work = build_work([(adapter.pooled, 0, 1)])
    assert work.layers[1] == {}
    assert set(work.layers[0]) == {LoraGroup.QKV}


@pytest.mark.parametrize("others", [1, 4, 20])
def test_base_rows_are_bit_equal_and_untouched_whatever_their_neighbours_use(others):
    pool = Pool()
    adapters = [pool.put([dict.fromkeys(ALL, r)] * LAYERS) for r in (8, 3)]
    rows = [r for t in range(others) for r in (None, adapters[t % 2], adapters[0])]
    for group in LoraGroup:
        x, y = inputs(pool, group, len(rows))
        base = [t for t, adapter in enumerate(rows) if adapter is None]
        y[base, 0], y[base, 1] = -0.0, NAN
        before = y.clone()
        run(pool, rows, group, 0, x, y)
        assert torch.equal(y[base].view(torch.int32), before[base].view(torch.int32))


@pytest.mark.parametrize("repeat", [1, 12], ids=["fused", "dense"])
def test_nan_in_the_pages_of_one_adapter_reaches_exactly_its_rows_and_leaves_with_it(repeat):
    pool = Pool()
    a, b = (pool.put([dict.fromkeys(ALL, 8)] * LAYERS) for _ in range(2))
    rows = [a, b, None, a] * repeat
    for group in LoraGroup:
        x, clean = inputs(pool, group, len(rows))
        dirty, again = clean.clone(), clean.clone()
        work = run(pool, rows, group, 1, x, clean)
        kept = pool.data[a.pages].clone()
        pool.data[a.pages] = NAN
        lora_add(x, dirty, pool.data, work, group, 1)
        pool.data[a.pages] = kept
        lora_add(x, again, pool.data, work, group, 1)
        mine = torch.tensor([adapter is a for adapter in rows])
        assert dirty[mine].isnan().all()
        assert torch.equal(dirty[~mine], clean[~mine])
        assert torch.equal(again, clean)


@pytest.mark.parametrize("repeat", [2, 20], ids=["fused", "dense"])
def test_other_pages_are_never_read(repeat):
    pool = Pool()
    adapter, other = (pool.put([dict.fromkeys(ALL, 8)] * LAYERS) for _ in range(2))
    x, y = inputs(pool, LoraGroup.GATE_UP, repeat)
    z = y.clone()
    run(pool, [adapter] * repeat, LoraGroup.GATE_UP, 2, x, y)
    rest = [p for p in range(len(pool.data)) if p not in adapter.pages]
    assert set(other.pages) <= set(rest)
    pool.data[rest] = 0.0
    run(pool, [adapter] * repeat, LoraGroup.GATE_UP, 2, x, z)
    assert torch.equal(y, z)
    assert not y.isnan().any()


def test_scratch_holds_at_most_the_largest_module_of_one_adapter_and_is_reused():
    pool = Pool()
    small, large = (pool.put([dict.fromkeys(ALL, r)] * LAYERS) for r in (4, 16))
    rows = [small] * 20 + [large] * 20 + [None]
    work = build_work([(small.pooled, 0, 20), (large.pooled, 20, 20)])
    seen = set()
    for layer in range(LAYERS):
        for group in LoraGroup:
            x, y = inputs(pool, group, len(rows))
            lora_add(x, y, pool.data, work, group, layer)
            seen.add(work.scratch.nbytes)
    largest = 16 * max(IN[g] + OUT[m] for g, modules in GROUP_MODULES.items() for m in modules)
    assert seen == {largest * 4}
    assert build_work([(large.pooled, 0, FUSED_ROWS)]).scratch.elems == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("repeat", [1, 7], ids=["fused", "dense"])
def test_sixteen_bit_dtypes_stay_within_their_rounding(dtype, repeat):
    pool = Pool(dtype=dtype)
    adapters = [pool.put([dict.fromkeys(ALL, r)] * LAYERS) for r in (8, 16)]
    rows = [adapters[0], None, adapters[1], adapters[0]] * repeat
    check(pool, rows, layers=[0], atol=0.25 if dtype is torch.bfloat16 else 0.03)


def test_y_may_be_a_slice_of_a_wider_tensor_and_the_pool_a_slice_of_more_pages():
    pool = Pool()
    adapter = pool.put([dict.fromkeys(ALL, 8)] * LAYERS)
    wide = torch.cat([torch.full_like(pool.data[:3], NAN), pool.data])
    pool.data = wide[3:]
    for num_rows in (3, 12):
        x, y = inputs(pool, LoraGroup.QKV, num_rows)
        wider = torch.zeros(num_rows, y.shape[1] + 7)
        wider[:, 4:-3] = y
        run(pool, [adapter] * num_rows, LoraGroup.QKV, 0, x, wider[:, 4:-3])
        want = expected([adapter] * num_rows, LoraGroup.QKV, 0, x, y)
        torch.testing.assert_close(wider[:, 4:-3], want, atol=2e-4, rtol=2e-4)
        assert not wider[:, :4].any()
        assert not wider[:, -3:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x=a["x"].half()), r"one dtype, got torch.float16"),
        (lambda a: a.update(x=a["x"].to("meta")), r"one device, got meta"),
        (lambda a: a.update(x=a["x"][:, :-1]), r"x must be contiguous .*96\], got \[4, 95\]"),
        (lambda a: a.update(x=a["x"][:-1], y=a["y"][:-1]), r"x must be contiguous \[T >= 4, 96\], got \[3, 96\]"),
        (lambda a: a.update(x=a["x"].t().contiguous().t()), r"x must be contiguous"),
        (lambda a: a.update(y=a["y"][:-1]), r"y must be \[4, at least 192\], got \[3, 192\]"),
        (lambda a: a.update(y=a["y"][:, :-1]), r"y must be \[4, at least 192\], got \[4, 191\]"),
        (lambda a: a.update(pool=a["pool"][:, :2]), r"pool must be contiguous .*, 3, .* got \[1200, 2"),
        (lambda a: a.update(pool=a["pool"][:1]), r"pool must be contiguous \[P > \d+"),
        (lambda a: a.update(pool=a["pool"][:, :, :, :2].contiguous()), r"with 256 elements a lane"),
        (lambda a: a.update(layer=3), r"layer must be from 0 to 2, got 3"),
        (lambda a: a.update(layer=-1), r"layer must be from 0 to 2, got -1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    pool = Pool()
    adapter = pool.put([dict.fromkeys(ALL, 8)] * LAYERS)
    x, y = inputs(pool, LoraGroup.QKV, 4)
    args = {"x": x, "y": y, "pool": pool.data, "group": LoraGroup.QKV, "layer": 0}
    change(args)
    with pytest.raises(ValueError, match=message):
        lora_add(work=build_work([(adapter.pooled, 0, 4)]), **args)


def test_contradictory_adapters_and_segments_are_refused():
    stream = lay_out({Module.Q: 8})
    layout = PooledLayout((stream,), (0, 0), 3, stream.elems * 4)
    ok = {"num_layers": 2, "lane_elems": 640}
    adapter = PooledAdapter(layout, [2, 0, 1], **ok)
    for pages in ([0, 1], [0, 1, 1], [0, 1, -1]):
        with pytest.raises(ValueError, match=r"3 different page ids"):
            PooledAdapter(layout, pages, **ok)
    with pytest.raises(ValueError, match=r"describes 2 layers, the pool has 4"):
        PooledAdapter(layout, [0, 1, 2], num_layers=4, lane_elems=640)
    with pytest.raises(ValueError, match=r"1792 elements does not fit 3 lanes of 64 elements"):
        PooledAdapter(layout, [0, 1, 2], num_layers=2, lane_elems=64)
    with pytest.raises(ValueError, match=r"device must be cpu, got cuda"):
        PooledAdapter(layout, [0, 1, 2], **ok, device="cuda")
    tiled = StreamLayout(stream.spans, stream.elems, StreamOrder.TILES, 32)
    with pytest.raises(ValueError, match=r"need images in StreamOrder.ROWS"):
        PooledAdapter(PooledLayout((tiled,), (0, 0), 3, 0), [0, 1, 2], **ok)
    with pytest.raises(ValueError, match=r"1 rows at 1 after row 2"):
        build_work([(adapter, 0, 2), (adapter, 1, 1)])
    other = PooledAdapter(layout, [0, 1, 2], num_layers=2, lane_elems=1280)
    with pytest.raises(ValueError, match=r"must share one pool"):
        build_work([(adapter, 0, 1), (other, 1, 1)])
