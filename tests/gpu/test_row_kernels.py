"""The small Triton kernels between products, and page lists, against torch in float64: on a GPU, or interpreted.

tests/reference/test_triton_small.py runs this file under Triton's interpreter in a process of its own.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from interleaf.kernels import flashinfer_jit

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import DEVICE, IS_INTERPRETED, ON_GPU  # noqa: E402

if not (ON_GPU or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from interleaf.kernels.page_lists import page_lists  # noqa: E402
from interleaf.model import fused  # noqa: E402

# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
ROWS = [0, 1, 3, 17] + [5000] * ON_GPU
WIDTHS = [64, 576, 4096] if ON_GPU else [64, 576]
WITH_FLASHINFER = ON_GPU and find_spec("flashinfer") is not None
NORMS = [fused.TritonNorm] + [fused.FlashInferNorm] * WITH_FLASHINFER
SWIGLUS = [fused.triton_swiglu] + [fused.flashinfer_swiglu] * WITH_FLASHINFER
EPS = 1e-5


def rand(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def skip_unless_computed(op, dtype):
    if "flashinfer" in op.__name__.lower() and dtype not in flashinfer_jit.HALF_TYPES:
        pytest.skip("16 bits only")


def close(found, expected, dtype):
    """Rounded once, from float32 sums that are good to some 2**-20 of themselves."""
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps / 2 + 2**-20
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), rtol=1.01 * unit, atol=2e-7)


def normed(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_alone_and_behind_an_addition(norm, rows, width, dtype):
    skip_unless_computed(norm, dtype)
    x, y, h = (rand(rows, width, dtype=dtype, seed=s) for s in (1, 2, 3))
    weight = rand(width, dtype=dtype, seed=4)
    kept = x.clone()
    op = norm(weight, EPS)
    close(op(x), normed(x, weight), dtype)
    assert torch.equal(x, kept)
    total = h + y
    found = op.add(y, h)
    assert torch.equal(h, total), "h takes the sum, rounded as torch rounds it"
    if norm is fused.TritonNorm:
        close(found, normed(total, weight), dtype)
    else:  # of the sum before it is rounded: each element may be off by another half unit
        torch.testing.assert_close(found.double(), normed(total, weight), rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_of_heads_in_place_leaves_the_heads_behind_them_alone(rows, dtype):
    qkv, weight = rand(rows, 7, 80, dtype=dtype), rand(5, 80, dtype=dtype, seed=2)
    expected, rest = normed(qkv[:, :5], weight), qkv[:, 5:].clone()
    fused.TritonNorm(weight, EPS).in_place(qkv[:, :5])
    close(qkv[:, :5], expected, dtype)
    assert torch.equal(qkv[:, 5:], rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 1536] + [14336] * ON_GPU)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("swiglu", SWIGLUS)
def test_swiglu(swiglu, rows, width, dtype):
    skip_unless_computed(swiglu, dtype)
    gate_up = rand(rows, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(swiglu(gate_up), gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_are_torchs_up_to_long_contexts(dtype):
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071], device=DEVICE)
    frequencies = (1.0 / 500000 ** (torch.arange(0, 40, 2) / 40)).to(DEVICE)
    cos, sin = fused.triton_angles(positions, frequencies, dtype)
    # The product is float32's; what is checked is the range reduction of angles of many turns.
    angle = (positions.float()[:, None, None] * frequencies).double()
    assert cos.shape == (6, 1, 40)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(cos.double(), angle.cos().repeat(1, 1, 2), rtol=0, atol=unit)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=unit)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize(("num_seqs", "num_decode"), [(1, 1), (1, 0), (5, 2), (7, 7), (16, 0)])
def test_page_lists_are_those_of_the_table(num_seqs, num_decode, page_tokens):
    random = np.random.default_rng(num_seqs)
    lengths = random.integers(1, 40 * page_tokens, num_seqs)
    lengths[0] = 2 * page_tokens
    seats = random.permutation(20)[:num_seqs]
    table = random.integers(0, 10**6, (21, 300))
    q_lens = np.where(np.arange(num_seqs) < num_decode, 1, random.integers(1, 9, num_seqs))
    q_starts = np.append(0, q_lens.cumsum())
    pages = -(-lengths // page_tokens)
    ids = np.concatenate([table[s, :n] for s, n in zip(seats, pages, strict=True)])

    def there(values):
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)

    # Places behind the end must stay as they are.
    out = {n: there(np.full(size + 3, -1)) for n, size in (("starts", num_seqs + 1), ("last", num_seqs))}
    chunk_starts, indices = there(np.full(num_seqs + 4, -1)), there(np.full(len(ids) + 3, -1))
    page_lists[(num_seqs,)](
        there(table), 300, there(seats), there(lengths), there(q_starts), out["starts"], out["last"], chunk_starts,
        indices, num_seqs, num_decode, PAGE_TOKENS=page_tokens, SEQS=32, BLOCK=16,
    )  # fmt: skip
    beyond = [-1, -1, -1]
    assert out["starts"].tolist() == [0, *pages.cumsum().tolist(), *beyond]
    assert out["last"].tolist() == [*((lengths - 1) % page_tokens + 1).tolist(), *beyond]
    chunks = (q_starts[num_decode:] - num_decode).tolist()
    assert chunk_starts.tolist()[: len(chunks)] == chunks
    assert set(chunk_starts.tolist()[len(chunks) :]) == {-1}
    assert indices.tolist() == [*ids.tolist(), *beyond]


def test_pages_of_many_long_sequences():
    if not ON_GPU:
        pytest.skip("takes long when interpreted")
    lengths = torch.full((1024,), 8192, dtype=torch.int32, device=DEVICE)
    table = torch.randint(10**6, (1025, 512), device=DEVICE, dtype=torch.int32)
    seats = torch.randperm(1024, device=DEVICE).int()
    starts, last, chunks = (torch.empty(1025, dtype=torch.int32, device=DEVICE) for _ in range(3))
    indices = torch.empty(1024 * 512, dtype=torch.int32, device=DEVICE)
    page_lists[(1024,)](
        table, 512, seats, lengths, starts, starts, last, chunks, indices, 1024, 1024, PAGE_TOKENS=16, SEQS=1024,
        BLOCK=128,
    )  # fmt: skip
    assert torch.equal(indices.view(1024, 512), table[seats.long()])
