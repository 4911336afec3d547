"""Which attention and which ops are chosen where; on a machine without a GPU."""

from dataclasses import replace

import pytest
import torch

from interleaf.attention import build_kernels, choose_attention, flashinfer, triton_paged
from interleaf.attention.flashinfer import FlashInferPaged
from interleaf.config import EngineConfig
from interleaf.core import ModelSpec
from interleaf.errors import ConfigError
from interleaf.kernels import flashinfer_jit
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from interleaf.model import ops
from interleaf.parallel.shard import Shard

SPEC = ModelSpec(
    family="llama", vocab_size=64, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    intermediate_size=512, rms_norm_eps=1e-5, max_position=128, sliding_window=9,
)  # fmt: skip


class PoolElsewhere(PagePool):
    """A pool that says that it is on a GPU."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(PageGeometry(4, 2, spec.num_kv_heads, spec.head_dim, dtype.itemsize), 5, dtype)
        self.data = self.data.as_subclass(OnGpu)


class OnGpu(torch.Tensor):
    is_cuda = True


class Library:
    """What is never called."""


class Triton:
    """Our kernels' backend, which needs a GPU or its interpreter."""

    def __init__(self, pool, num_heads, *, window, max_seqs, max_rows):
        self.settings = num_heads, window, max_seqs, max_rows


@pytest.fixture(autouse=True)
def no_triton(monkeypatch):
    monkeypatch.setattr(triton_paged, "TritonPaged", Triton)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(flashinfer_jit, "is_installed", lambda: True)
    monkeypatch.setattr(flashinfer_jit, "attention", lambda *_: Library())
    monkeypatch.setattr(flashinfer, "_multiprocessors", lambda _: 132)


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(flashinfer_jit, "is_installed", lambda: False)


def choose(name, spec=SPEC, dtype=torch.bfloat16, pool=PoolElsewhere):
    config = EngineConfig(device="cpu", attention=name)
    return choose_attention(pool(spec, dtype), Shard(spec), dtype, config)


@pytest.mark.usefixtures("installed")
def test_flashinfer_is_chosen_where_it_computes_the_model():
    assert isinstance(choose("auto"), FlashInferPaged)
    assert isinstance(choose("flashinfer"), FlashInferPaged)
    assert choose("auto").window_left == 8


@pytest.mark.usefixtures("installed")
def test_what_flashinfer_does_not_compute_runs_on_our_kernels_unless_it_was_named():
    narrow = replace(SPEC, head_dim=80)
    assert isinstance(choose("auto", dtype=torch.float32), Triton)
    assert isinstance(choose("auto", narrow), Triton)
    with pytest.raises(ConfigError, match="heads of"):
        choose("flashinfer", narrow)
    with pytest.raises(ConfigError, match="float32"):
        choose("flashinfer", dtype=torch.float32)
    config = EngineConfig(device="cpu")
    assert choose("triton").settings == (4, 9, config.max_num_seqs, config.max_batch_tokens)


@pytest.mark.usefixtures("missing")
def test_without_flashinfer_our_kernels_are_chosen_and_its_name_is_refused():
    assert isinstance(choose("auto"), Triton)
    with pytest.raises(ConfigError, match="flashinfer-python"):
        choose("flashinfer")


@pytest.mark.usefixtures("installed")
def test_nothing_is_compiled_for_a_model_that_flashinfer_does_not_run(monkeypatch):
    monkeypatch.setattr(flashinfer_jit, "build", lambda *_, **__: pytest.fail("compiled"))
    build_kernels(SPEC, torch.float32, EngineConfig(device="cpu"))


@pytest.mark.parametrize(
    ("name", "head_dim", "attends"), [("auto", 64, True), ("auto", 80, False), ("triton", 64, False)]
)
@pytest.mark.usefixtures("installed")
def test_attention_is_compiled_where_it_is_flashinfers_and_the_rest_in_any_case(name, head_dim, attends, monkeypatch):
    built = []
    monkeypatch.setattr(flashinfer_jit, "build", lambda *_, attends: built.append(attends))
    build_kernels(replace(SPEC, head_dim=head_dim), torch.bfloat16, EngineConfig(device="cpu", attention=name))
    assert built == [attends]


@pytest.mark.parametrize("error", [
    ImportError("libcudart.so.13: cannot open"), RuntimeError("Could not find nvcc\nand so on"), KeyError(),
])  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_where_flashinfer_is_broken_our_kernels_are_used_and_the_log_says_why(error, monkeypatch, caplog):
    def build(*_, **__):
        raise error

    monkeypatch.setattr(flashinfer_jit, "build", build)
    monkeypatch.setattr(flashinfer_jit, "_given_up", False)
    with pytest.raises(ConfigError, match="cannot be had"):
        build_kernels(SPEC, torch.bfloat16, EngineConfig(device="cpu", attention="flashinfer"))
    assert isinstance(choose("auto"), FlashInferPaged)
    build_kernels(SPEC, torch.bfloat16, EngineConfig(device="cpu"))
    assert isinstance(choose("auto"), Triton)
    assert not flashinfer_jit.is_usable()  # which decides who computes norms, too
    (line,) = caplog.messages
    assert line.endswith((str(error).splitlines() or [type(error).__name__])[0])


@pytest.mark.usefixtures("installed")
def test_what_is_compiled_is_told(monkeypatch):
    told, built = [], []

    def build(dtype, head_dim, windowed, progress, *, attends):
        built.append((dtype, head_dim, windowed))
        progress(1, 3)
        progress(3, 3)

    monkeypatch.setattr(flashinfer_jit, "build", build)
    build_kernels(SPEC, torch.bfloat16, EngineConfig(device="cpu"), lambda *told_now: told.append(told_now))
    assert built == [(torch.bfloat16, 64, True)]
    assert told == [("kernels", 1, 3), ("kernels", 3, 3)]


def test_float32_products_must_not_be_rounded_to_tf32():
    gpu = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigError, match="'high'"):
            ops.choose_row_ops(gpu, torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")
