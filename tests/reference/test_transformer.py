"""The decoder, through the pool, against transformers' float32 models of every family."""

import pytest
import torch

from interleaf.core import LoraGroup, RopeKind, RopeSpec
from interleaf.errors import CheckpointError
from interleaf.model import layers
from interleaf.model.layers import Linear
from interleaf.model.loading import TensorReader
from interleaf.model.rope import inverse_frequencies
from interleaf.model.transformer import Transformer
from interleaf.parallel.shard import Shard
from tests.support.pooled_model import PooledModel, checkpoint_of, load, spec_of
from tests.support.tiny_models import FAMILIES, VOCAB, make_model

LENGTH = 44
"""Tokens of a sequence: more than the tiny models' original context and sliding window."""


def tokens(seed, length=LENGTH):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """(transformers' model, ours) of one family."""
    model = make_model(request.param)
    return model, load(model)


@torch.no_grad()
def expected_logits(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


def check(found, expected, atol=1e-4):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_prompt_and_decode_steps_equal_transformers(family, page_tokens):
    model, ours = family
    ids = tokens(1)
    expected = expected_logits(model, ids)
    pooled = PooledModel(ours, page_tokens)
    check(pooled.step(chunks=[(0, ids[:-6])]), expected[:-6])
    for i in range(LENGTH - 6, LENGTH):
        check(pooled.step(decode=[(0, ids[i])]), expected[i : i + 1])


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_a_prompt_in_chunks_equals_the_whole_prompt(family, page_tokens):
    model, ours = family
    ids = tokens(2)
    pooled = PooledModel(ours, page_tokens)
    parts = [pooled.step(chunks=[(0, ids[a:b])]) for a, b in [(0, 1), (1, 12), (12, 29), (29, LENGTH)]]
    check(torch.cat(parts), expected_logits(model, ids))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_chunks_of_every_size_and_remainder_equal_the_whole_prompt(family, chunk):
    """Lengths from 1 leave every remainder, one row included: a row that sees others but no row behind it."""
    model, ours = family
    for length in range(1, 14):
        ids = tokens(length, length)
        pooled = PooledModel(ours)
        parts = [pooled.step(chunks=[(0, ids[a : a + chunk])]) for a in range(0, length, chunk)]
        check(torch.cat(parts), expected_logits(model, ids))


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_prompt_rows_and_decode_rows_of_one_batch_do_not_mix(family, page_tokens):
    model, ours = family
    ids = [tokens(seed) for seed in range(4)]
    expected = [expected_logits(model, i) for i in ids]
    pooled = PooledModel(ours, page_tokens)
    pooled.step(chunks=[(0, ids[0][:20]), (1, ids[1][:3])])
    found = pooled.step([(0, ids[0][20]), (1, ids[1][3])], [(2, ids[2][:30]), (3, ids[3][:5])])
    check(found, torch.cat([expected[0][20:21], expected[1][3:4], expected[2][:30], expected[3][:5]]))
    found = pooled.step([(1, ids[1][4]), (2, ids[2][30])], [(3, ids[3][5:])])
    check(found, torch.cat([expected[1][4:5], expected[2][30:31], expected[3][5:]]))


def test_only_the_sampled_rows_have_logits(family):
    _, ours = family
    ids = tokens(3)
    whole = PooledModel(ours).step(chunks=[(0, ids[:9]), (1, ids[9:20])])
    some = PooledModel(ours).step(chunks=[(0, ids[:9]), (1, ids[9:20])], sampled=[8, 19])
    check(some, whole[[8, 19]], atol=1e-5)


def test_free_pages_of_nan_change_no_bit(family):
    _, ours = family
    ids = tokens(4)
    found = []
    for fill in (0.0, float("nan")):
        pooled = PooledModel(ours, fill=fill)
        found.append(pooled.step(chunks=[(0, ids[:17]), (1, ids[:2])]))
        found.append(pooled.step([(0, ids[17]), (1, ids[2])], [(2, ids[:6])]))
        found.append(pooled.step([(0, ids[18]), (1, ids[3]), (2, ids[6])]))
    assert all(part.isfinite().all() for part in found)
    assert all(torch.equal(clean, poisoned) for clean, poisoned in zip(found[:3], found[3:], strict=True))


def test_each_base_linear_runs_once_per_layer_and_step(family, monkeypatch):
    _, ours = family
    rows = []
    call = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: rows.append((self, len(x))) or call(self, x))
    pooled = PooledModel(ours)
    pooled.step(chunks=[(0, tokens(5, 7)), (1, tokens(6, 3))])
    rows.clear()
    pooled.step([(0, 1), (1, 2)], [(2, tokens(7, 4))], sampled=[0, 1, 5])
    products = [p for layer in ours.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert rows == [(p, 6) for p in products] + [(ours.head, 3)]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 33])
@pytest.mark.parametrize("kind", ["packed", "plain", "widened", "bfloat16"])
def test_a_linear_is_the_matrix_product_however_its_weight_is_kept(kind, num_rows, monkeypatch):
    monkeypatch.setattr(layers, "_can_pack", lambda weight: kind == "packed")
    monkeypatch.setattr(layers, "_must_widen", lambda weight: kind in ("widened", "bfloat16"))
    monkeypatch.setattr(layers, "_WIDENED_ELEMS", 5 * 48)  # 5 rows at a time; the last time fewer
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    random = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*s, generator=random).to(dtype) for s in ((num_rows, 48), (33, 48), (33,)))
    found = Linear(weight, bias)(x)
    assert found.dtype == dtype
    expected = x.double() @ weight.double().t() + bias.double()
    # bfloat16: rounded once, so within half a unit of its 8 bits.
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5)


def test_a_step_of_base_rows_calls_no_lora_op(family, monkeypatch):
    _, ours = family
    monkeypatch.setattr("interleaf.model.transformer.lora_add", lambda *_: pytest.fail("a LoRA op was called"))
    PooledModel(ours).step(chunks=[(0, tokens(8, 5))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_are_close(family, dtype):
    model, _ = family
    ids = tokens(9, 20)
    expected = expected_logits(model, ids)
    pooled = PooledModel(load(model, dtype))
    found = torch.cat([pooled.step(chunks=[(0, ids[:15])]), *(pooled.step([(0, t)]) for t in ids[15:])])
    assert found.dtype == dtype
    # As close as transformers' own model in that dtype, which rounds in other places: three times its distance.
    with torch.no_grad():
        theirs = make_model_in(model, dtype)(torch.tensor([ids])).logits[0]
    allowed = 3 * (theirs.float() - expected).square().mean().sqrt()
    assert (found.float() - expected).square().mean().sqrt() < allowed


def make_model_in(model, dtype):
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(dtype).eval()


def test_progress_counts_every_tensor():
    model = make_model("qwen3")
    seen = []
    load(model, progress=lambda done, total: seen.append((done, total)))
    total = len(checkpoint_of(model).tensors)
    assert seen == [(i, total) for i in range(1, total + 1)]


def load_changed(family, change):
    model = make_model(family)
    checkpoint = checkpoint_of(model)
    change(checkpoint.tensors)
    return Transformer.load(spec_of(model), Shard(spec_of(model)), checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), r"lacks model\.layers\.2\.mlp\.up_proj\.weight"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}), r"layers\.3.*no place for"),
        (lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}), r"o_proj\.bias.*no place for"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32)}),
            r"model\.norm\.weight has shape \[32\], the configuration asks for \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(128, 64)}),
            r"q_proj\.weight has shape \[128, 64\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, 64)}), r"lm_head\.weight differs from"),
    ],
)
def test_a_checkpoint_that_contradicts_the_configuration_is_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        load_changed("qwen2", change)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight",
                                  "model.layers.2.self_attn.k_proj.bias", "model.norm.weight"])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(name, value):
    def spoil(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-3] = value

    with pytest.raises(CheckpointError, match=f"NaN or infinite in float32, .* in {name}$"):
        load_changed("qwen2", spoil)


def test_weights_beyond_the_dtype_that_is_asked_for_are_refused_by_name():
    model = make_model("llama3")
    checkpoint = checkpoint_of(model)
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].clone()
    checkpoint.tensors[name][0, 0] = 70000.0
    Transformer.load(spec_of(model), Shard(spec_of(model)), checkpoint, torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"in float16, whose largest is 65504, in {name}$"):
        Transformer.load(spec_of(model), Shard(spec_of(model)), checkpoint, torch.float16)


def test_derived_buffers_and_a_copy_of_a_tied_head_are_accepted():
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load_changed("qwen2", add)


def test_two_ranks_read_the_halves_of_what_one_rank_reads():
    model = make_model("qwen2")
    spec = spec_of(model)
    whole, *ranks = (
        TensorReader(spec, Shard(spec, rank, world), checkpoint_of(model), torch.float32, torch.device("cpu"))
        for rank, world in ((0, 1), (0, 2), (1, 2))
    )
    weight, bias = whole.group(1, LoraGroup.QKV)
    (first, first_bias), (second, second_bias) = (reader.group(1, LoraGroup.QKV) for reader in ranks)
    q, k = spec.q_size // 2, spec.kv_size // 2
    for both, one, other in ((weight, first, second), (bias, first_bias, second_bias)):
        halves = [torch.cat(pair) for pair in zip(one.split([q, k, k]), other.split([q, k, k]), strict=True)]
        assert torch.equal(torch.cat(halves), both)
    down = [reader.group(2, LoraGroup.DOWN)[0] for reader in ranks]
    assert torch.equal(torch.cat(down, dim=1), whole.group(2, LoraGroup.DOWN)[0])


def test_llama3_scaling_keeps_high_frequencies_and_stretches_low_ones():
    spec = RopeSpec(theta=5e5, kind=RopeKind.LLAMA3, factor=8.0, original_max_position=8192)
    plain = inverse_frequencies(RopeSpec(theta=5e5), 128)
    ratio = plain / inverse_frequencies(spec, 128)
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert (ratio.diff() >= 0).all()
