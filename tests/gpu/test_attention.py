"""Attention over a device's pages against float64 loops: on a CUDA device, or interpreted on the CPU.

tests/reference/test_triton_attention.py runs this file under Triton's interpreter in a process of its own.
"""

import pytest
import torch

from interleaf.kernels.rotary import RopeAngles, rotate

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import DEVICE, IS_INTERPRETED, ON_GPU  # noqa: E402

if not (ON_GPU or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from interleaf.attention.triton_paged import TritonPaged  # noqa: E402
from interleaf.kernels.kv import rotate_and_append  # noqa: E402
from tests.support.device_sequences import LAYER, LAYERS, DeviceSequences, Heads  # noqa: E402

# The interpreter has no products of bfloat16; float32 on a GPU must not fall back to tf32.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
NAN = float("nan")
EVERY = pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[1:], ids=str)
GROUPS = [Heads(q, kv, 16) for q, kv in ((2, 2), (4, 2), (3, 1), (8, 2), (6, 1), (7, 1), (8, 1), (20, 1))]
MIXES = [(p, w, d) for p in (1, 2, 4, 8, 16, 32, 64) for w in (None, 1, 5, 70) for d in DTYPES]
if not ON_GPU:  # the interpreter takes a thousand times as long: a part of the matrix must do
    MIXES = [(1, None, DTYPES[1]), (4, 5, DTYPES[0]), (16, 70, DTYPES[1]), (64, None, DTYPES[0])]
    GROUPS = [Heads(3, 1, 16), Heads(7, 1, 16), Heads(20, 1, 16)]


def triton_paged(pool, num_heads, window):
    return TritonPaged(pool, num_heads, window=window, max_seqs=40, max_rows=2000)


def sequences(heads=Heads(4, 2, 16), page_tokens=4, dtype=torch.float32, **settings):  # noqa: B008
    return DeviceSequences(triton_paged, heads, page_tokens, dtype, **settings)


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


# --- rotation and the writing of k and v ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(7, 1, 64), Heads(6, 2, 80), Heads(20, 4, 128)], ids=str)
def test_rows_are_rotated_and_their_slots_written_and_nothing_else_is(heads, dtype):
    random = torch.Generator().manual_seed(1)
    num_pages, page_tokens, rows = 6, 4, 5
    shape = (num_pages, LAYERS, 2, page_tokens, heads.kv, heads.dim)
    pool = torch.randn(shape, generator=random).to(dtype)
    qkv = torch.randn(rows, heads.q + 2 * heads.kv, heads.dim, generator=random).to(dtype)
    radians = torch.rand(rows, 1, heads.dim // 2, generator=random) * 7
    angles = RopeAngles(radians.cos().repeat(1, 1, 2).to(dtype), radians.sin().to(dtype))
    slots = torch.randperm(num_pages * page_tokens, generator=random)[:rows]

    there = pool.clone().to(DEVICE)
    on_device = RopeAngles(angles.cos.to(DEVICE), angles.sin.to(DEVICE))
    q = rotate_and_append(qkv.to(DEVICE), on_device, slots.to(DEVICE), there, LAYER)

    turned = rotate(qkv, angles)
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, page_tokens)
        pool[page, LAYER, 0, offset] = turned[row, heads.q : -heads.kv]
        pool[page, LAYER, 1, offset] = qkv[row, -heads.kv :]
    assert q.is_contiguous()
    if dtype == torch.float32:  # two roundings or, where products are fused with sums, one
        torch.testing.assert_close(q.cpu(), turned[:, : heads.q], atol=1e-6, rtol=0)
        torch.testing.assert_close(there.cpu(), pool, atol=1e-6, rtol=0)
    else:
        assert torch.equal(q.cpu(), turned[:, : heads.q])
        assert torch.equal(bits(there.cpu()), bits(pool))


def test_rotation_is_that_of_complex_numbers():
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2)).double()
    radians = torch.tensor([0.0, 1.5, 40.0]).double()[:, None, None] * torch.linspace(1, 0.1, 8).double()
    found = rotate(x, RopeAngles(radians.cos().repeat(1, 1, 2), radians.sin()))
    product = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(radians), radians)
    torch.testing.assert_close(found, torch.cat([product.real, product.imag], -1))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("qkv", {"qkv": torch.zeros(2, 5, 16)}),
        ("qkv", {"qkv": torch.zeros(2, 8, 32, device=DEVICE)[..., ::2]}),
        ("slots", {"slots": torch.zeros(3, dtype=torch.int64)}),
        ("sin", {"sin": torch.zeros(2, 1, 16)}),
        ("dtype", {"qkv": torch.zeros(2, 8, 16, dtype=torch.float16)}),
        ("pool", {"layer": 2}),
    ],
)
def test_arguments_that_do_not_fit_are_named(name, wrong):
    given = {
        "qkv": torch.zeros(2, 8, 16),
        "cos": torch.zeros(2, 1, 16),
        "sin": torch.zeros(2, 1, 8),
        "slots": torch.zeros(2, dtype=torch.int64),
        "layer": 0,
    } | wrong
    x = {n: v.to(DEVICE) if torch.is_tensor(v) else v for n, v in given.items()}
    pool = torch.zeros(3, LAYERS, 2, 4, 2, 16, device=DEVICE)
    # More than 2 * 2 heads are needed; 5 leave one for q.
    if name == "qkv" and x["qkv"].shape[1] == 5:
        pool = torch.zeros(3, LAYERS, 2, 4, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match=name):
        rotate_and_append(x["qkv"], RopeAngles(x["cos"], x["sin"]), x["slots"], pool, x["layer"])


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_tokens", "window", "dtype"), MIXES, ids=str)
def test_chunks_and_decode_rows_of_one_batch_see_their_own_past_only(page_tokens, window, dtype):
    them = sequences(page_tokens=page_tokens, dtype=dtype, window=window, num_pages=200 if page_tokens > 1 else 400)
    them.check([], [(0, 7), (1, 1), (3, 90 if ON_GPU else 35)])
    them.check([0, 1], [(2, 5), (3, 40), (4, 4)])
    them.check([0, 1, 2, 3, 4])
    them.check([2, 4], [(0, 9), (1, 2)])
    them.check([4, 1, 3])


@EVERY
@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_any_number_of_query_heads_shares_a_kv_head(heads, dtype):
    them = sequences(heads, dtype=dtype)
    them.check([], [(0, 19), (1, 3)])
    them.check([0], [(2, 6), (1, 33)])
    them.check([2, 1, 0])


@EVERY
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 160, 256] if ON_GPU else [80])
def test_any_size_of_head(dim, dtype):
    them = sequences(Heads(4, 2, dim), dtype=dtype)
    them.check([], [(0, 21), (1, 3)])
    them.check([0, 1], [(2, 70)])
    them.check([2, 0])


@EVERY
@pytest.mark.parametrize("window", [None, 400])
def test_long_sequences_are_cut_in_parts_and_short_ones_beside_them_are_not(window, dtype):
    them = sequences(page_tokens=16, dtype=dtype, window=window)
    for seat, count in enumerate((700, 3, 130, 64)):
        them.fill(seat, count)
    them.check([0, 1, 2, 3])
    them.check([2, 0], [(1, 5)])


@pytest.mark.parametrize("window", [None, 3])
def test_the_rows_of_a_graph_are_padded_and_the_padding_is_harmless(window):
    them = sequences(window=window)
    them.fill(0, 300)
    them.fill(1, 5)
    for decode, padding in (([0, 1], 2), ([1], 3), ([2, 1, 0, 3], 0)):
        them.check(decode, padding=padding, prepare="prepare_graph")


@pytest.mark.parametrize("page_tokens", [1, 16] if ON_GPU else [4])
def test_what_pages_held_before_changes_no_bit(page_tokens):
    answers = []
    for fill in (0.0, NAN, float("inf")):
        them = sequences(page_tokens=page_tokens, window=9)
        them.pool.data.fill_(fill)
        steps = [them.step([], [(0, 21), (1, 2)]), them.step([0, 1], [(2, 5)])]
        answers.append(torch.cat([found for found, _ in steps]))
    assert answers[0].isfinite().all()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_sequence_of_nan_leaves_its_neighbours_alone():
    clean, dirty = sequences(), sequences()
    for them in (clean, dirty):
        for seat, count in enumerate((9, 1, 5)):
            them.fill(seat, count)
    dirty.pool.data[dirty.table[1, 0]] = torch.nan
    for step in (([0, 1, 2],), ([0], [(1, 3), (2, 4)])):
        (expected, _), (found, _) = clean.step(*step), dirty.step(*step)
        of_nan = slice(1, 2) if len(step) == 1 else slice(1, 4)
        assert found[of_nan].isnan().all()
        found[of_nan] = expected[of_nan]
        assert torch.equal(found, expected)


def test_the_same_step_gives_the_same_bits():
    answers = []
    for _ in range(2):
        them = sequences(page_tokens=16)
        them.fill(0, 500 if ON_GPU else 200)
        answers.append(torch.cat([them.step([0], [(1, 9)])[0], them.step([1, 0])[0]]))
    assert torch.equal(*answers)


def test_a_step_larger_than_announced_is_refused():
    them = sequences(num_seats=41, num_pages=600)
    with pytest.raises(ValueError, match="40 sequences"):
        them.attention.prepare(them.rows(range(41)))
    with pytest.raises(ValueError, match="2000 rows"):
        them.attention.prepare(them.rows([], [(0, 1001), (1, 1000)]))


def test_heads_that_cannot_share_are_refused():
    them = sequences()
    with pytest.raises(ValueError, match="multiple of 2 KV heads"):
        triton_paged(them.pool, 5, None)


@pytest.mark.skipif(not ON_GPU, reason="needs more memory than a test may take on a CPU")
@pytest.mark.parametrize("page_tokens", [1, 64])
def test_pages_beyond_two_to_the_31_elements_are_read_where_they_are(page_tokens):
    heads = Heads(8, 4, 64)
    per_page = LAYERS * 2 * page_tokens * heads.kv * heads.dim
    num_pages = 3 * 2**30 // per_page
    high = list(range(2**31 // per_page + 5, num_pages - 1, num_pages // 800))
    them = sequences(heads, page_tokens, torch.bfloat16, num_pages=num_pages, pages=high)
    them.check([], [(0, 20), (1, 75)])
    them.check([0, 1], [(2, 9)])
    them.check([2, 1, 0], padding=2, prepare="prepare_graph")


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@EVERY
def test_a_captured_graph_follows_lengths_and_pages(dtype):
    them = sequences(Heads(8, 2, 64), 16, dtype, num_seats=6, num_pages=400)
    for seat, count in enumerate((1500, 3, 64, 0, 17)):
        them.fill(seat, count)
    static = them.rows([0, 1, 2], padding=1)
    qkv, angles = them.inputs(static)
    static_qkv, on_device = qkv.to(DEVICE), RopeAngles(angles.cos.to(DEVICE), angles.sin.to(DEVICE))
    step = them.attention.prepare_graph(static)
    step.forward(LAYER, static_qkv.clone(), on_device)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step.forward(LAYER, static_qkv, on_device)
    for decode in ([0, 1, 2], [4, 0], [3], [2, 4, 3, 0], [1, 2, 3]):
        padding = 4 - len(decode)
        rows = them.rows(decode, padding=padding)
        qkv, angles = them.inputs(rows)
        for name in ("table", "seats", "kv_lens", "q_starts", "slots", "positions"):
            getattr(static, name).copy_(getattr(rows, name))
        static_qkv.copy_(qkv)
        on_device.cos.copy_(angles.cos)
        on_device.sin.copy_(angles.sin)
        them.attention.prepare_graph(rows)
        graph.replay()
        them.compare(out[: len(decode)].cpu(), them.expected(rows, qkv, angles))
