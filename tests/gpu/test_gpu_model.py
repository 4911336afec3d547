"""The decoder with a GPU's ops and attention against the same on the CPU: on a CUDA device, or interpreted.

tests/reference/test_triton_small.py runs this file under Triton's interpreter in a process of its own.
"""

from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from interleaf.parallel.shard import Shard
from interleaf.weights import open_checkpoint

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import DEVICE, IS_INTERPRETED, ON_GPU  # noqa: E402

if not (ON_GPU or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from interleaf.attention.triton_paged import TritonPaged  # noqa: E402
from interleaf.model import fused, ops, transformer  # noqa: E402
from interleaf.model.spec import parse_spec  # noqa: E402
from interleaf.model.transformer import Batch, Transformer  # noqa: E402
from tests.support.device_model import DeviceModel  # noqa: E402
from tests.support.pooled_model import PooledModel, checkpoint_of, load, spec_of  # noqa: E402
from tests.support.static_rows import StaticRows  # noqa: E402
from tests.support.tiny_models import FAMILIES, VOCAB, make_model, save_model  # noqa: E402

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
needs_flashinfer = pytest.mark.skipif(not (ON_GPU and find_spec("flashinfer")), reason="needs FlashInfer on a GPU")
OUR_OPS = ops.RowOps(fused.TritonNorm, fused.TritonNorm, fused.triton_swiglu, fused.triton_angles)


def triton_paged(pool, num_heads, window):
    return TritonPaged(pool, num_heads, window=window, max_seqs=16, max_rows=400)


def flashinfer_paged(pool, num_heads, window):
    from interleaf.attention.flashinfer import FlashInferPaged

    return FlashInferPaged(pool, num_heads, window=window, max_seqs=16)


def tokens(seed, length):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def steps(model):
    """A prompt, a mixed step of which some rows are sampled, and a decode step."""
    return [
        model.step(chunks=[(0, tokens(1, 10)), (1, tokens(2, 3))]),
        model.step([(0, 3), (1, 4)], [(2, tokens(3, 5))], sampled=[0, 1, 6]),
        model.step([(0, 5), (1, 6), (2, 7)]),
    ]


@pytest.mark.parametrize("family", FAMILIES if ON_GPU else ["llama2-linear", "qwen3"])
def test_float32_is_the_cpus_to_rounding(family, monkeypatch):
    model = make_model(family)
    expected = steps(PooledModel(load(model)))
    monkeypatch.setattr(transformer, "choose_row_ops", lambda *_: OUR_OPS)
    found = steps(DeviceModel(load(model, device=DEVICE), triton_paged))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-5)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def wide_model():
    """Heads of 128, which FlashInfer takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return model


def distance(found, expected):
    return (found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()


@needs_flashinfer
def test_16_bits_by_flashinfer_and_by_our_kernels_are_as_close_to_float32_as_the_cpus(monkeypatch):
    model, dtype = wide_model(), torch.bfloat16
    expected = steps(PooledModel(load(model)))
    on_cpu = steps(PooledModel(load(model, dtype)))
    found = {"flashinfer": steps(DeviceModel(load(model, dtype, device=DEVICE), flashinfer_paged))}
    monkeypatch.setattr(transformer, "choose_row_ops", lambda *_: OUR_OPS)
    found["ours"] = steps(DeviceModel(load(model, dtype, device=DEVICE), triton_paged))
    for answers in found.values():
        for ours, cpus, theirs in zip(answers, on_cpu, expected, strict=True):
            assert ours.dtype == dtype
            assert distance(ours, theirs) < 1.5 * distance(cpus, theirs)


@needs_gpu
@pytest.mark.parametrize("make", [triton_paged, pytest.param(flashinfer_paged, marks=needs_flashinfer)])
def test_a_whole_decode_step_can_be_captured_and_replayed(make):
    dtype = torch.bfloat16
    model = load(wide_model(), dtype, device=DEVICE)
    eager, replayed = (DeviceModel(model, make) for _ in range(2))
    for them in (eager, replayed):
        them.step(chunks=[(0, tokens(1, 20)), (1, tokens(2, 5))])
    graph, static = torch.cuda.CUDAGraph(), StaticRows()
    for i in range(6):
        decode = [(0, 3 + i), (1, 4 + i)]
        expected = eager.step(decode)
        new, token_ids = replayed.rows(decode)
        rows = static.take(new)
        attention = replayed.attention.prepare_graph(rows)
        if i == 0:
            static_ids = token_ids
            batch = Batch(static_ids, rows.positions, attention)
            replayed.model.forward(batch, replayed.pool.data)  # compiles what is not compiled yet
            with torch.cuda.graph(graph):
                logits = replayed.model.forward(batch, replayed.pool.data)
        static_ids.copy_(token_ids)
        graph.replay()
        torch.testing.assert_close(logits.cpu(), expected, atol=0.05, rtol=0.05)


@needs_gpu
def test_weights_on_a_gpu_are_the_checkpoints(tmp_path):
    model = make_model("qwen3")
    spec = spec_of(model)
    checkpoint = open_checkpoint(str(save_model(model, tmp_path)))
    there = Transformer.load(spec, Shard(spec), checkpoint, torch.bfloat16, DEVICE)
    here = Transformer.load(spec, Shard(spec), checkpoint_of(model), torch.bfloat16)
    assert torch.equal(there._embed.cpu(), here._embed)
    for ours, theirs in zip(there.layers, here.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(getattr(ours, name)._weight.cpu(), getattr(theirs, name)._weight)
    checkpoint.close()


@needs_gpu
def test_dummy_weights_of_a_gpu_keep_logits_sane(tmp_path):
    model = wide_model()
    model.config.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), "dummy", seed=1)
    spec = parse_spec(checkpoint.config, "dummy")
    ours = Transformer.load(spec, Shard(spec), checkpoint, torch.float32, DEVICE)
    logits = DeviceModel(ours, triton_paged).step(chunks=[(0, tokens(1, 64))])
    assert 0.3 < logits.std() < 3.0
