"""The LoRA book of a GPU: records made on the device, launches shared by many steps. On a device, or interpreted.

tests/reference/test_device_lora.py runs this file under Triton's interpreter in a process of its own.
"""

import os

import pytest
import torch

from interleaf.core import LoraGroup, Module
from interleaf.kernels import cuda, kv, launcher, lora_add, moulds
from interleaf.kernels.cuda import PagedLaunch
from interleaf.kernels.launch_shapes import CUT_RANKS
from interleaf.kernels.rotary import RopeAngles

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.support.paged_lora import DEVICE, NAN, Pool, Widths, popularity, segments  # noqa: E402
from tests.support.step_records import AdapterRecords, StepRows  # noqa: E402

WIDTHS = Widths(hidden=192, q=256, kv=64, mlp=2304)
ON_GPU = DEVICE.type == "cuda"


def small_pages(dtype=torch.float32):
    """Lanes of four tiles: every tile's page is looked up."""
    return Pool(WIDTHS, (2, 2, 1, 2, 64), 40000, 64, dtype)


def large_pages(dtype=torch.float32):
    """Lanes as long as the largest piece: records name places in the pool."""
    return Pool(WIDTHS, (2, 2, 64, 4, 64), 300, 64, dtype)


POOLS = pytest.mark.parametrize("make_pool", [small_pages, large_pages])


def launched(work, layer, group):
    """(form, expand, real records) of each launch that has any; records as tuples, in order."""
    runs = work.layers[layer][group].runs if group in work.layers[layer] else ()
    made = []
    for run in runs:
        records = [tuple(r) for r in run._records.cpu().tolist() if r[3] & 0xFF]
        assert all(not any(r) for r in run._records.cpu().tolist() if not r[3] & 0xFF)
        if records:
            made.append((run.shape.form, run.shape.expand, sorted(records)))
    return made


def oracle(pool, adapters, rows, book, layer, group):
    """The same of the step's records as the host builds them; pages are looked up where the book keeps them."""
    of = {}
    for t, adapter in enumerate(rows):
        if adapter:
            of.setdefault(id(adapter), (adapter, []))[1].append(t)
    members = [of[id(a)] for a in adapters if id(a) in of]  # in the order in which the book numbers them
    at = {"num_layers": pool.layers, "lane_elems": pool.lane_elems}
    highest = max(AdapterRecords(a.layout, a.pages, **at).highest for a in adapters)
    step = StepRows([AdapterRecords(a.layout, a.pages, **at) for a, _ in members], [n for _, n in members], highest)
    where = book._residents._page_firsts.tolist()
    first_of = {}
    lists = step.pages.tolist()
    for i, adapter in enumerate(adapters):
        if id(adapter) in of:
            first_of[len(first_of)] = where[i]
    moved = {}
    entry = 0
    for i, (adapter, _) in enumerate(members):
        assert lists[entry : entry + len(adapter.pages)] == list(adapter.pages)
        moved[entry] = first_of[i]
        entry += len(adapter.pages)
    groups = step.groups([a.layout.layer_layout[layer] for a, _ in members])
    made = []
    for launch in groups[group].launches if group in groups else ():
        records = [(r[0], moved[r[1]] if r[2] < 0 else r[1], *r[2:]) for r in launch.records.tolist()]
        made.append((launch.form, launch.expand, sorted(records)))
    return made, step.rows.tolist()


@POOLS
@pytest.mark.parametrize("ranks", [[8], [1, 16], [3, 8, 64, 100]] if ON_GPU else [[8, 3, 100]], ids=str)
def test_resolved_records_are_those_that_the_host_would_build(make_pool, ranks):
    pool = make_pool()
    adapters = [pool.all_ranks(ranks[i % len(ranks)]) for i in range(4)]
    adapters.append(pool.put([{Module.DOWN: 4, Module.Q: 6}, None]))
    book = pool.book()
    for adapter in adapters:
        book.add(id(adapter), adapter.layout, adapter.pages)
    for kind, num_rows in (("distinct", 5), ("zipf", 13), ("some base", 40)) if ON_GPU else (("some base", 9),):
        rows = popularity(kind, adapters, num_rows, pool.random)
        step = book.plan(segments(rows), graph=False)
        step.upload()
        for layer in range(pool.layers):
            for group in LoraGroup:
                want, row_table = oracle(pool, adapters, rows, book, layer, group)
                assert launched(step.work, layer, group) == want
                assert step._tables.tables.rows[: len(row_table)].tolist() == row_table


def check_step(pool, book, rows, *, graph, tolerance=2e-5, step=None):
    """A step's update against the float32 loops.   Args: step: not the one that `plan` gives."""
    step = step or book.plan(segments(rows), graph=graph)
    step.upload()
    for group in LoraGroup if ON_GPU else (LoraGroup.QKV,):
        x, y, before = pool.inputs(group, len(rows))
        lora_add(x, y, pool.data, step.work, group, 1)
        want = pool.expected(rows, group, 1, x, before)
        error = (y.cpu().float() - want).norm()
        assert error <= tolerance * want.norm() * 2, f"{group}: {error}"
        for t, adapter in enumerate(rows):
            rest = ~pool.touched(adapter, group, 1)
            assert torch.equal(y[t].cpu()[rest], before[t].cpu()[rest])
    return step


@POOLS
def test_steps_of_one_key_share_work_that_does_each_steps_own(make_pool):
    pool = make_pool()
    a, b, c, d = (pool.all_ranks(r) for r in (8, 16, 3, 8))
    book = pool.book()
    for adapter in (a, b, c, d):
        book.add(id(adapter), adapter.layout, adapter.pages)
    first = check_step(pool, book, [a, b, None, c, d, a], graph=True)
    first._tables.tables.v.fill_(NAN)
    second = check_step(pool, book, [b, b, a, None, d, c], graph=True)
    assert second.key == first.key
    assert second.work is first.work
    with_base = check_step(pool, book, [None, a, None, b, None, None], graph=True)
    assert with_base.key == first.key


def test_adapters_come_and_go_and_come_back_elsewhere():
    pool = large_pages()
    a, b = pool.all_ranks(8), pool.put([{Module.V: 5}, {Module.Q: 40, Module.DOWN: 16}])
    book = pool.book()
    book.add("a", a.layout, a.pages)
    book.add("b", b.layout, b.pages)
    rows = [("a", 0, 1), ("b", 1, 2), (None, 3, 1)]
    step = book.plan(rows, graph=True)
    assert book.plan(list(rows), graph=True) is step
    book.remove("a")
    with pytest.raises(ValueError, match="adapter a is not in the pool"):
        book.plan(rows, graph=True)
    again = pool.all_ranks(8)
    book.add("a", again.layout, again.pages)
    back = book.plan(rows, graph=True)
    assert back.key == step.key
    assert back.work is step.work
    back.upload()
    mixed = [again, b, b, None]
    for group in (LoraGroup.QKV, LoraGroup.DOWN):
        x, y, before = pool.inputs(group, 4)
        lora_add(x, y, pool.data, back.work, group, 1)
        torch.testing.assert_close(y.cpu(), pool.expected(mixed, group, 1, x, before), atol=2e-4, rtol=2e-4)


def test_a_step_that_stands_already_is_not_uploaded_again():
    pool = large_pages()
    a = pool.all_ranks(8)
    book = pool.book()
    book.add("a", a.layout, a.pages)
    rows = [("a", 0, 2)]
    step = book.plan(rows, graph=True)
    step.upload()
    step._tables.tables.records.fill_(7)
    book.plan(rows, graph=True).upload()
    assert (step._tables.tables.records == 7).all()
    book.plan([("a", 0, 1)], graph=True).upload()
    step.upload()
    assert not (step._tables.tables.records[:4] == 7).any()


def test_moved_page_lists_and_recut_layouts_leave_no_stale_place_behind(monkeypatch):
    from interleaf.kernels import residents

    monkeypatch.setattr(residents, "_PAGE_ENTRIES", 256)
    monkeypatch.setattr(residents, "_MOST_PIECES", 100)
    pool = small_pages()
    adapters = [pool.all_ranks(r) for r in (1, 2, 1, 3)]
    book = pool.book()
    keys = []
    for i, adapter in enumerate(adapters):
        book.add(id(adapter), adapter.layout, adapter.pages)
        keys.append(check_step(pool, book, adapters[: i + 1], graph=True).key)
    assert len(set(keys)) > 1
    assert book._residents.pages.numel() > 256


def test_a_step_that_takes_the_work_of_others_computes_its_own(monkeypatch):
    monkeypatch.setattr(moulds, "_WORTH", -1.0)  # every step gets a mould made for it
    monkeypatch.setattr(moulds, "_STANDS_IN", 100.0)
    pool = large_pages()
    adapters = [pool.all_ranks(r) for r in (8, 16, 3)]
    book = pool.book()
    for adapter in adapters:
        book.add(id(adapter), adapter.layout, adapter.pages)
    a, b, c = adapters
    batches = [[a, b, c, a, b, c, a, None], [a] * 8, [a, a, b, b, c, c, None, b], [None, c, c, c, c, c, c, c]]
    keys = {book.plan(segments(rows), graph=True).key for rows in batches}
    seen = set()
    for rows in batches:
        for key in keys:
            found = book.stand_in(segments(rows), lambda k, key=key: k == key)
            if found is not None:
                assert check_step(pool, book, rows, graph=True, step=found[0]).key == key
                seen.add((key, book.plan(segments(rows), graph=True).key))
    assert any(key != own for key, own in seen)


@pytest.mark.parametrize("ranks", [(16, 3), (64, 8), (5, 100)])
def test_warming_runs_every_launch_of_whatever_adapters_come_and_changes_nothing(monkeypatch, ranks):
    pool = large_pages()
    book = pool.book()
    assert book.warm(pool.data) == 0
    for rank in CUT_RANKS:
        cut = pool.all_ranks(rank)
        book.add(id(cut), cut.layout, cut.pages)
    before = pool.data.clone()
    warmed = set()
    with monkeypatch.context() as patched:
        add = PagedLaunch.add
        patched.setattr(PagedLaunch, "add", lambda self, *a: (warmed.add(self.shape), add(self, *a)))
        assert book.warm(pool.data) == len(warmed)
    adapters = [pool.all_ranks(r, (Module.V, Module.DOWN)) for r in ranks]
    book = pool.book()
    for adapter in adapters:
        before[list(adapter.pages)] = pool.data[list(adapter.pages)]
        book.add(id(adapter), adapter.layout, adapter.pages)
    assert torch.equal(pool.data.nan_to_num(7.5), before.nan_to_num(7.5))
    for count in (1, 2, 30, 64):
        for graph in (True, False):
            for rows in ([adapters[0]] * count, [adapters[t % 2] for t in range(count)]):
                for groups in book.plan(segments(rows), graph=graph).work.layers:
                    assert {run.shape for runs in groups.values() for run in runs.runs} <= warmed


def begun_at(tensor, by):
    """The same values, contiguous, begun `by` elements later in memory."""
    store = torch.empty(by + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return store[by:].view(tensor.shape).copy_(tensor)


def specialised(arguments):
    """What Triton compiles for, of each argument."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    return tuple(native_specialize_impl(CUDABackend, a, False, True, True) for a in arguments)


def test_launches_of_one_kind_are_alike_to_triton(monkeypatch):
    seen = {}

    class Recorder:
        def __init__(self, kernel):
            pass

        def launch(self, kind, grid, arguments, constants, options):
            told = specialised(arguments[:-1]), *constants.items(), *options.items()  # the last is a layer, an int32
            assert seen.setdefault((self, kind), told) == told

    monkeypatch.setattr(cuda, "Launcher", Recorder)
    num_kinds = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 40, 64, dtype)
        adapter = pool.all_ranks(8)
        book = pool.book()
        book.add(id(adapter), adapter.layout, adapter.pages)
        for graph in (False, True):
            work = book.plan(segments([adapter] * 3), graph=graph).work
            for pool_at in (0, 1):
                data = begun_at(pool.data, pool_at)
                for group in LoraGroup:
                    x, y, _ = pool.inputs(group, 3)
                    for by in (0, 1, 3, 8):
                        for room in (0, 1, 3, 8, 16):
                            wide = begun_at(torch.zeros(3, y.shape[1] + room, dtype=dtype, device=DEVICE), by)
                            lora_add(begun_at(x, by), wide[:, : y.shape[1]], data, work, group, 0)
                num_kinds.append(len(seen))
    assert num_kinds == sorted(set(num_kinds)), "each pool and dtype has kinds of its own"


def test_rotations_of_one_kind_are_alike_to_triton(monkeypatch):
    seen = {}

    class Recorder:
        def launch(self, kind, grid, arguments, constants, options):
            told = specialised(arguments[:5]), specialised(arguments[6:]), *constants.items(), *options.items()
            assert seen.setdefault(kind, told) == told

    monkeypatch.setattr(kv, "_launcher", Recorder)
    tried = 0
    for dtype in (torch.bfloat16, torch.float16):
        for heads, kv_heads, dim in ((4, 2, 16), (4, 2, 64), (8, 2, 64)):
            tensors = [
                torch.zeros(3, heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE),
                torch.zeros(3, 1, dim, dtype=dtype, device=DEVICE),
                torch.zeros(3, 1, dim // 2, dtype=dtype, device=DEVICE),
                torch.zeros(3, dtype=torch.int64, device=DEVICE),
                torch.zeros(2, 2, 2, 4, kv_heads, dim, dtype=dtype, device=DEVICE),
            ]
            for moved in range(-1, len(tensors)):
                qkv, cos, sin, slots, pool = (begun_at(x, int(i == moved)) for i, x in enumerate(tensors))
                kv.rotate_and_append(qkv, RopeAngles(cos, sin), slots, pool, 1)
                tried += 1
    assert len(seen) == tried


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no compiled forms")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("count", [3, 40])
def test_launches_of_compiled_forms_give_the_bits_that_triton_s_own_give(monkeypatch, graph, count):
    """Rows of every alignment, in turn, through the same launches: each takes the form compiled for its like."""
    pool = large_pages(torch.bfloat16)
    adapters = [pool.all_ranks(r) for r in (8, 64, 5)]
    book = pool.book()
    for adapter in adapters:
        book.add(id(adapter), adapter.layout, adapter.pages)
    rows = segments([adapters[t * len(adapters) // count] for t in range(count)])

    def moved(tensor, by, room):
        """The same values, begun `by` elements later, rows `room` elements further apart."""
        store = torch.empty(by + tensor.shape[0] * (tensor.shape[1] + room), dtype=tensor.dtype, device=tensor.device)
        found = store[by:].view(tensor.shape[0], -1)[:, : tensor.shape[1]]
        return found.copy_(tensor)

    wanted = []
    for layer in range(pool.layers):
        for group in LoraGroup:
            x, y, _ = pool.inputs(group, count)
            for by in (0, 1, 8):
                for room in (0, 3, 16):
                    wanted.append((layer, group, (x, by), (y, by, room)))

    def results():
        book._latest.clear()
        step = book.plan(rows, graph=graph)
        step.upload()
        for layer, group, (x, by), (y, *place) in wanted:
            out = moved(y, *place)
            lora_add(moved(x, by, 0), out, pool.data, step.work, group, layer)
            yield out

    with monkeypatch.context() as patched:
        patched.setattr(launcher, "_is_known", lambda: False)
        expected = list(results())
    assert launcher._is_known()
    for _ in range(2):
        assert all(map(torch.equal, results(), expected))
    assert not any(map(torch.equal, expected, (y for *_, (y, _, _) in wanted)))


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("make_pool", [small_pages, large_pages])
def test_captured_graphs_replay_changing_compositions(make_pool):
    pool = make_pool(torch.bfloat16)
    adapters = [pool.all_ranks(r) for r in (8, 16, 64, 5)]
    book = pool.book()
    for adapter in adapters:
        book.add(id(adapter), adapter.layout, adapter.pages)
    group, size = LoraGroup.GATE_UP, 40
    x, y, _ = pool.inputs(group, size)
    graphs = {}
    for turn in range(30):
        kind = ("zipf", "some base", "distinct", "identical")[turn % 4]
        rows = popularity(kind, adapters, size - turn % 3, pool.random) + [None] * (turn % 3)
        new_x, before, _ = pool.inputs(group, size)
        x.copy_(new_x)
        step = book.plan(segments(rows), graph=True)
        if step is None:
            continue
        step.upload()
        if step.key not in graphs:
            lora_add(x, y, pool.data, step.work, group, 1)  # compiles
            graphs[step.key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[step.key]):
                lora_add(x, y, pool.data, step.work, group, 1)
        y.copy_(before)
        graphs[step.key].replay()
        want = pool.expected(rows, group, 1, x, before)
        assert (y.cpu().float() - want).norm() <= 1.5e-2 * want.norm()
    assert len(graphs) < 8
