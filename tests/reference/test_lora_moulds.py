"""Which launches decode steps take: few distinct ones over any traffic, with room for the step and little to spare."""

from collections import defaultdict

import numpy as np
import pytest

from interleaf.core import GROUP_MODULES, Module, ModuleSpan, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels import DeviceLora, device_lora
from interleaf.kernels import moulds as moulds_module
from interleaf.kernels.moulds import MAX_MOULDS, Moulds
from interleaf.kernels.schemes import SchemeTable

LAYERS = 4
LANE = 32768
WIDTHS = dict.fromkeys(Module, (4096, 4096)) | {
    Module.K: (4096, 1024),
    Module.V: (4096, 1024),
    Module.GATE: (4096, 14336),
    Module.UP: (4096, 14336),
    Module.DOWN: (14336, 4096),
}
QKVO = (Module.Q, Module.K, Module.V, Module.O)


def layout(rank, targets=tuple(Module), layers=LAYERS):
    """One stream for the first `layers` layers."""
    spans, at = [], 0
    for modules in GROUP_MODULES.values():
        column = 0
        mine = []
        for m in modules:
            if m in targets:
                mine.append((m, at, column))
                at += rank * WIDTHS[m][0]
            column += WIDTHS[m][1]
        for m, a_first, column in mine:
            spans.append(ModuleSpan(m, rank, *WIDTHS[m], a_first, at, column))
            at += rank * WIDTHS[m][1]
    stream = StreamLayout(tuple(spans), at, StreamOrder.TILES, 128)
    return PooledLayout((stream,), (0,) * layers + (None,) * (LAYERS - layers), -(-at // LANE), 0)


def filled(layouts, count, max_rows=1024):
    book = DeviceLora(num_layers=LAYERS, lane_elems=LANE, max_rows=max_rows, device="cpu")
    page = 0
    for i in range(count):
        mine = layouts[i % len(layouts)]
        book.add(i, mine, range(page, page + mine.pages))
        page += mine.pages
    return book


def singles(uids):
    return [(uid, t, 1) for t, uid in enumerate(uids)]


R16 = [layout(16)]
MIXED = [layout(r, QKVO) for r in (64, 32, 16, 8)]
UNLIKE = [layout(16), layout(8, QKVO, layers=2), layout(5, (Module.DOWN,))]


def popular(random, count, alpha):
    weights = 1 / np.arange(1, count + 1) ** alpha
    return weights / weights.sum()


@pytest.mark.parametrize("layouts", [R16, MIXED, UNLIKE], ids=["r16", "mixed", "unlike"])
def test_any_traffic_meets_few_distinct_launches_each_with_room_for_its_step(layouts):
    book = filled(layouts, 300)
    random = np.random.default_rng(0)
    keys = defaultdict(set)
    for _ in range(500):
        count, size = int(random.integers(1, 301)), int(random.choice([1, 3, 9, 50, 130, 256, 900]))
        shares = popular(random, count, random.choice([0, 0.5, 1, 2]))
        for _ in range(3):
            step = book.plan(singles(random.choice(count, size, p=shares).tolist()), graph=True)
            keys[(size - 1).bit_length()].add(step.key)
            assert (step._table.tasks[:, 1] >= 0).all()  # what is left over of each launch, among others
    assert max(len(k) for k in keys.values()) <= MAX_MOULDS
    assert sum(len(k) for k in keys.values()) <= 6 * len(keys) + 6


@pytest.mark.parametrize("layouts", [R16, MIXED], ids=["r16", "mixed"])
@pytest.mark.parametrize(("count", "alpha"), [(1, 0), (50, 1), (300, 0), (300, 1)])
def test_a_saturated_run_stays_with_one_or_two(layouts, count, alpha):
    book = filled(layouts, count)
    random = np.random.default_rng(1)
    shares = popular(random, count, alpha)
    running = random.choice(count, 256, p=shares).tolist()
    keys = defaultdict(int)
    for _ in range(250):
        for seat in random.integers(0, 256, 3):
            running[seat] = int(random.choice(count, p=shares))
        keys[book.plan(singles(running[: 256 - int(random.integers(0, 40))]), graph=True).key] += 1
    assert len(keys) <= 3


@pytest.mark.parametrize("layouts", [R16, MIXED, UNLIKE], ids=["r16", "mixed", "unlike"])
def test_a_mould_costs_little_more_than_one_made_to_measure(layouts):
    book = filled(layouts, 300)
    table = SchemeTable(book._residents.layouts(), 256)
    random = np.random.default_rng(2)
    moulds = Moulds()
    excess = []
    for _ in range(200):
        count = int(random.choice([5, 60, 250]))
        uids = random.choice(count, 250, p=popular(random, count, 1))
        members, _ = book._residents.members(singles(uids.tolist()))
        demand = table.demand(members.layouts, members.counts)
        mould = moulds.choose(demand, table)
        need = demand.records[mould.scheme]
        assert (mould.records >= need).all()
        cost = demand.floor + demand.cost[mould.scheme] + table.idle(mould.records - need)
        excess.append(cost / (demand.floor + demand.cost.min()) - 1)
    assert np.mean(excess) < 0.04


@pytest.mark.parametrize("layouts", [R16, UNLIKE], ids=["r16", "unlike"])
def test_the_demand_is_what_the_steps_tasks_add_up_to(layouts):
    book = filled(layouts, 20)
    random = np.random.default_rng(3)
    for _ in range(10):
        uids = random.integers(0, 20, 70).tolist()
        members, _ = book._residents.members(singles(uids))
        step = book.plan(singles(uids), graph=True)
        table = book._scheme_table(128)
        demand = table.demand(members.layouts, members.counts)
        real = step._table.tasks[step._table.tasks[:, 6] > 0]
        (mould,) = (m for f in book._families.values() for m, c in f.casts.items() if c.key == step.key)
        assert real[:, 1].sum() == demand.records[mould.scheme].sum()
        assert step._table.tasks[:, 1].sum() == mould.records.sum()


@pytest.mark.parametrize("at_most", [2.0, 1.2])
@pytest.mark.parametrize("layouts", [R16, MIXED, UNLIKE], ids=["r16", "mixed", "unlike"])
def test_what_stands_in_is_the_cheapest_that_may_and_has_room(monkeypatch, layouts, at_most):
    monkeypatch.setattr(moulds_module, "_STANDS_IN", at_most)
    book = filled(layouts, 300)
    table = SchemeTable(book._residents.layouts(), 256)
    random = np.random.default_rng(4)
    moulds, made, outcomes = Moulds(), [], set()
    assert moulds.stand_in(table.demand(*_members(book, [1, 2])), table, lambda _: True) is None
    for _ in range(150):
        count = int(random.choice([1, 5, 60, 250]))
        uids = random.choice(count, int(random.integers(1, 251)), p=popular(random, count, 1)).tolist()
        demand = table.demand(*_members(book, uids))
        chosen = moulds.choose(demand, table)
        made += [chosen] if chosen not in made else []
        allowed = [mould for mould in made if random.random() < 0.4]
        found = moulds.stand_in(demand, table, allowed.__contains__)
        costs = {}
        for mould in allowed:  # one after another, by the definition
            spare = mould.records - demand.records[mould.scheme]
            if (spare >= 0).all():
                costs[id(mould)] = float(demand.cost[mould.scheme] + table.idle(spare))
        least = min(
            float(demand.cost[s] + table.idle(_roomy(demand.records[s], table) - demand.records[s]))
            for s in range(len(table.schemes))
        )
        fit = {i: cost for i, cost in costs.items() if cost + demand.floor <= at_most * (least + demand.floor)}
        if found is None:
            assert not fit
        else:
            mould, extra = found
            assert costs[id(mould)] == pytest.approx(min(fit.values()))
            assert extra == pytest.approx(max(0.0, costs[id(mould)] - least))
        outcomes.add((found is None, bool(costs)))
    assert {(True, False), (False, True)} <= outcomes


def _members(book, uids):
    members, _ = book._residents.members(singles(uids))
    return members.layouts, members.counts


def _roomy(records, table):
    """What a mould made for so many records has room for."""
    return np.minimum(np.maximum(np.ceil(records * 1.125), table.most), table.most * table.bucket).max(0)


def test_adapters_that_have_gone_leave_no_trace_in_the_launches_of_others():
    """One adapter of a high rank, or of few modules, makes all kernels others; not for longer than it is there."""
    rows = singles([t % 7 for t in range(60)])

    def shapes(book):
        work = book.plan(rows, graph=True).work
        return [(run.shape, len(run._records)) for group in work.layers[0].values() for run in group.runs]

    book = filled(R16, 7)
    alone, key = shapes(book), book.plan(rows, graph=True).key
    for i, strange in enumerate([layout(64), layout(64), layout(3, (Module.DOWN,)), layout(64)]):
        book.add("strange", strange, range(5000, 5000 + strange.pages))
        assert shapes(book) != alone, i
        book.remove("strange")
        assert shapes(book) == alone
        assert book.plan(rows, graph=True).key == key, "graphs of before are found again"
    for uid in range(7):
        book.remove(uid)
    strange = layout(64)
    book.add("strange", strange, range(5000, 5000 + strange.pages))
    assert book.plan(singles(["strange"] * 3), graph=True) is not None
    book.remove("strange")
    for uid in range(7):
        book.add(uid, R16[0], range(uid * R16[0].pages, (uid + 1) * R16[0].pages))
    assert shapes(book) == alone
    assert book.plan(rows, graph=True).key == key


def test_a_step_may_take_the_work_of_others_that_it_fits():
    book = filled(R16, 300)
    many = book.plan(singles(range(250)), graph=True)
    few = book.plan(singles([0] * 250), graph=True)
    assert many.key != few.key
    rows = singles([t // 2 for t in range(250)])
    own = book.plan(rows, graph=True)
    asked = []
    step, extra_s = book.stand_in(rows, lambda key: asked.append(key) or key == many.key)
    assert (step.key, step.work) == (many.key, many.work)
    (family,) = (f for f in book._families.values() if any(c.key == many.key for c in f.casts.values()))
    table, casts = book._scheme_table(256), family.casts
    demand = table.demand(*_members(book, [uid for uid, _, _ in rows]))
    _, extra_us = family.moulds.stand_in(demand, table, lambda m: m in casts and casts[m].key == many.key)
    assert extra_s == pytest.approx(extra_us * LAYERS / 1e6)
    assert extra_us > 0
    assert {own.key, many.key} >= set(asked) - {few.key}
    real = step._table.tasks[step._table.tasks[:, 6] > 0]
    assert len(real)
    assert step._table.rows.tolist() == own._table.rows.tolist()
    again = book.stand_in(list(rows), lambda key: key == many.key)
    assert (again[0] is step, again[1]) == (True, extra_s), "nothing is made anew for the same rows"
    others = singles([t // 2 for t in range(249)])
    assert book.stand_in(others, lambda key: key == many.key)[0] is not step
    assert book.stand_in(others, lambda key: False) is None, "nor is it taken when its graph has gone"
    assert book.stand_in(rows, lambda key: key == few.key) is None, "records for one adapter do not do for 125"
    assert book.stand_in(rows, lambda key: False) is None
    assert book.stand_in([(None, 0, 5)], lambda key: True) is None


@pytest.mark.parametrize("change", ["moves", "comes", "goes"])
def test_no_stand_in_outlives_a_change_of_the_pool(change):
    """Its records say where adapters were. (A table that lies on the device already is not resolved again.)"""
    book = filled(R16, 130)
    many = book.plan(singles([t // 2 for t in range(250)]), graph=True)
    rows = singles([t % 5 for t in range(240)])
    assert book.plan(rows, graph=True).key != many.key
    step, _ = book.stand_in(rows, lambda key: key == many.key)
    assert book.stand_in(rows, lambda key: key == many.key)[0] is step
    pages = range(100_000, 100_000 + R16[0].pages)
    if change == "moves":
        book.remove(0)
        book.add(0, R16[0], pages)
    elif change == "comes":
        book.add("new", R16[0], pages)
    else:
        book.remove(129)
    again, _ = book.stand_in(rows, lambda key: key == many.key)
    assert again._table is not step._table


def test_the_last_mould_takes_whatever_comes():
    book = filled(R16, 300)
    table = SchemeTable(book._residents.layouts(), 256)
    moulds = Moulds()
    made = set()
    for count in [*range(1, 257, 3), 256]:
        for others in (0, 1):
            rows = np.full(count, 1)
            rows[0] += others * (256 - count)
            demand = table.demand(np.zeros(count, dtype=np.int64), rows)
            mould = moulds.choose(demand, table)
            assert (mould.records >= demand.records[mould.scheme]).all()
            made.add(mould)
    assert len(made) <= MAX_MOULDS


@pytest.mark.parametrize("max_rows", [1, 3, 6, 96, 300])
@pytest.mark.parametrize("layouts", [R16, UNLIKE], ids=["r16", "unlike"])
def test_no_mould_has_more_records_than_its_table(layouts, max_rows):
    """The last bucket of rows is larger than any step, unless the seats are a power of two."""
    book = filled(layouts, max_rows, max_rows)
    for adapters in {max_rows, -(-max_rows // 2), 1}:
        step = book.plan(singles([t % adapters for t in range(max_rows)]), graph=True)
        tables, tasks = step._tables.tables, step._table.tasks
        assert (tasks[:, 4] + tasks[:, 1]).max() <= len(tables.records)
        assert tasks.size + max_rows <= len(step._tables._ints)


def test_rows_and_adapters_that_do_not_fit_are_refused_by_name():
    book = filled(R16, 2)
    pages = range(1000, 1000 + R16[0].pages)
    assert book.plan([], graph=True) is None
    assert book.plan([(None, 0, 5)], graph=False) is None
    with pytest.raises(ValueError, match=r"1 rows at 1 after row 2"):
        book.plan([(0, 0, 2), (1, 1, 1)], graph=True)
    with pytest.raises(ValueError, match=r"at most 1024 rows, got 1025"):
        book.plan([(0, 0, 1025)], graph=True)
    assert book.plan([(0, 0, 1025)], graph=False).key is None
    with pytest.raises(ValueError, match=r"adapter x is not in the pool"):
        book.plan([("x", 0, 1)], graph=True)
    with pytest.raises(ValueError, match=r"adapter 1 is in the pool already"):
        book.add(1, R16[0], pages)
    with pytest.raises(ValueError, match=r"adapter x is not in the pool"):
        book.remove("x")
    with pytest.raises(ValueError, match=rf"{R16[0].pages} different page ids"):
        book.add("x", R16[0], [*pages[:-1], 1000])
    with pytest.raises(ValueError, match=r"beyond 2\^31 tiles"):
        book.add("x", R16[0], [*pages[:-1], 2**21])
    other = layout(16).layouts[0]
    with pytest.raises(ValueError, match=r"describes 3 layers, the pool has 4"):
        book.add("x", PooledLayout((other,), (0, 0, 0), R16[0].pages, 0), pages)
    with pytest.raises(ValueError, match=r"does not fit 1 lanes"):
        book.add("x", PooledLayout((other,), (0,) * LAYERS, 1, 0), [7])
    rowwise = StreamLayout(other.spans, other.elems)
    with pytest.raises(ValueError, match=r"need images in StreamOrder.TILES"):
        book.add("x", PooledLayout((rowwise,), (0,) * LAYERS, R16[0].pages, 0), pages)
    finer = StreamLayout(other.spans, other.elems, StreamOrder.TILES, 64)
    with pytest.raises(ValueError, match=r"a tile must have 128 elements, as all in this pool, got 64"):
        book.add("x", PooledLayout((finer,), (0,) * LAYERS, R16[0].pages, 0), pages)


def test_launches_of_kinds_of_adapters_that_came_and_went_are_forgotten(monkeypatch):
    monkeypatch.setattr(device_lora, "_MAX_FAMILIES", 3)
    book = DeviceLora(num_layers=LAYERS, lane_elems=LANE, max_rows=64, device="cpu")
    keys = []
    for rank in range(1, 12):
        adapter = layout(16 * rank)
        book.add(rank, adapter, range(adapter.pages))
        keys += [book.plan(singles([rank] * size), graph=True).key for size in (1, 3)]
        book.remove(rank)
    assert len(set(keys)) == len(keys)
    assert len(book._families) == 3
