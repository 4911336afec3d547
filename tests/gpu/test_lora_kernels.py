"""The Triton LoRA kernels over scattered pages against float32 loops: on a CUDA device, or interpreted on the CPU.

tests/reference/test_lora_kernels.py runs this file under Triton's interpreter in a process of its own.
"""

import os

import pytest
import torch

from interleaf.core import LoraGroup, Module
from interleaf.kernels import lora_add

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.support.paged_lora import ALL, DEVICE, NAN, Pool, Widths, popularity  # noqa: E402

WIDTHS = Widths(hidden=192, q=256, kv=64, mlp=2304)
# The interpreter has no bfloat16 products; float32 on a GPU must not fall back to tf32.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def small_pages(dtype=torch.float32):
    """Lanes of four tiles: every tile's page is looked up."""
    return Pool(WIDTHS, (2, 2, 1, 2, 64), 40000, 64, dtype)


def large_pages(dtype=torch.float32):
    """Lanes as long as the largest piece: records name places in the pool."""
    return Pool(WIDTHS, (2, 2, 64, 4, 64), 300, 64, dtype)


ON_GPU = DEVICE.type == "cuda"  # the interpreter takes a thousand times as long: a part of the matrix must do
POOLS = pytest.mark.parametrize("make_pool", [small_pages, large_pages])


RANKS = [[8], [1, 16], [3, 8, 64], [256]]
KINDS = ["identical", "distinct", "zipf", "some base"]
MATRIX = [(r, k) for r in RANKS for k in KINDS] if ON_GPU else list(zip(RANKS[:3], KINDS[1:], strict=True))


@POOLS
@pytest.mark.parametrize(("ranks", "kind"), MATRIX, ids=str)
def test_every_row_gets_its_own_adapter(make_pool, kind, ranks):
    pool = make_pool()
    count = 5 if ranks != [256] else 2
    adapters = [pool.all_ranks(ranks[i % len(ranks)]) for i in range(count)]
    for num_rows in (1, 7, 33) if ON_GPU else (9,):
        pool.check(popularity(kind, adapters, num_rows, pool.random), layers=[num_rows % 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 65, 150, 1100] if ON_GPU else [1, 27])
def test_any_number_of_rows_in_any_dtype(rows, dtype):
    pool = large_pages(dtype)
    a, b, c = (pool.all_ranks(r) for r in (16, 5, 40))
    pool.check([a] * rows, layers=[1], tolerance=TOLERANCE[dtype])
    pool.check(
        [a, b, c, None] * min(rows, 40) if rows < 20 else [b] + [a] * rows, layers=[0], tolerance=TOLERANCE[dtype]
    )


@POOLS
def test_only_targeted_modules_change_and_ranks_may_differ_between_modules_and_layers(make_pool):
    pool = make_pool()
    mixed = {Module.Q: 8, Module.K: 2, Module.V: 17, Module.UP: 5, Module.DOWN: 16}
    a = pool.put([mixed, None])
    b = pool.put([{Module.O: 33, Module.GATE: 12, Module.UP: 70}, mixed])
    c = pool.all_ranks(4)
    d = pool.all_ranks(8, (Module.V,))
    pool.check([a, b, None, c, b, a, a, d])
    if ON_GPU:
        pool.check([a] * 11 + [b] * 3 + [None] + [c] * 12)


def test_base_rows_are_bit_equal_whatever_stands_in_them():
    pool = large_pages()
    adapters = [pool.all_ranks(r) for r in (8, 3)]
    rows = [r for t in range(9) for r in (None, adapters[t % 2], adapters[0])]
    for group in LoraGroup:
        x, y, before = pool.inputs(group, len(rows))
        base = [t for t, adapter in enumerate(rows) if adapter is None]
        for z in (y, before):
            z[base, 0], z[base, 1] = -0.0, NAN
        lora_add(x, y, pool.data, pool.work(rows), group, 0)
        assert torch.equal(y[base].view(torch.int32), before[base].view(torch.int32))


def test_the_same_work_gives_the_same_bits_whatever_the_scratch_held():
    pool = large_pages()
    adapters = [pool.all_ranks(r) for r in (8, 64, 3, 100)]
    rows = popularity("some base", adapters, 60 if ON_GPU else 9, pool.random) + [adapters[0]] * (70 if ON_GPU else 26)
    for group in (LoraGroup.QKV, LoraGroup.DOWN):
        x, y, again = pool.inputs(group, len(rows))
        work = pool.work(rows)
        lora_add(x, y, pool.data, work, group, 0)
        for run in work.layers[0][group].runs:
            run._tables.v.fill_(NAN)
        lora_add(x, again, pool.data, work, group, 0)
        assert torch.equal(y, again)
        assert not y.isnan().any()


def test_y_may_be_a_slice_of_a_wider_tensor():
    pool = large_pages()
    adapter = pool.all_ranks(8)
    for num_rows in (3, 12):
        x, y, before = pool.inputs(LoraGroup.QKV, num_rows)
        wider = torch.zeros(num_rows, y.shape[1] + 7, device=DEVICE)
        wider[:, 4:-3] = y
        lora_add(x, wider[:, 4:-3], pool.data, pool.work([adapter] * num_rows), LoraGroup.QKV, 0)
        want = pool.expected([adapter] * num_rows, LoraGroup.QKV, 0, x, before)
        torch.testing.assert_close(wider[:, 4:-3].cpu(), want, atol=2e-4, rtol=2e-4)
        assert not wider[:, :4].any()
        assert not wider[:, -3:].any()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs more memory than a test may take on a CPU")
@pytest.mark.parametrize("page_tokens", [1, 64])
def test_pages_beyond_two_to_the_31_elements_are_read_where_they_are(page_tokens):
    per_page = 2 * 2 * page_tokens * 4 * 64
    num_pages = 3 * 2**30 // per_page
    high = list(range(2 * 2**30 // per_page + 5, num_pages, num_pages // 400))
    pool = Pool(WIDTHS, (2, 2, page_tokens, 4, 64), num_pages, 64, torch.bfloat16, free=high + list(range(9000)))
    pool.free = pool.free[::-1]
    adapters = [pool.all_ranks(r) for r in (16, 8, 64)]
    assert max(p for a in adapters for p in a.pages) * per_page > 2**31
    pool.check([*adapters, None, *adapters[:2] * 20, *[adapters[0]] * 80], tolerance=1.5e-2)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA graphs")
def test_a_captured_graph_replays_the_same_update():
    pool = large_pages(torch.bfloat16)
    adapters = [pool.all_ranks(r) for r in (8, 16, 64)]
    rows = popularity("zipf", adapters, 40, pool.random)
    work = pool.work(rows)
    x, y, before = pool.inputs(LoraGroup.GATE_UP, len(rows))
    lora_add(x, y, pool.data, work, LoraGroup.GATE_UP, 1)
    static = before.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_add(x, static, pool.data, work, LoraGroup.GATE_UP, 1)
    static.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(static, y)


def test_every_module_alone():
    pool = large_pages()
    for module in ALL if ON_GPU else (Module.K,):
        adapter = pool.all_ranks(11, (module,))
        pool.check([adapter, None, adapter, adapter], layers=[0])
