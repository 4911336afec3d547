"""Which configurations become which ModelSpec, and which are refused. The configurations are those of real models."""

from typing import Any

import pytest

from interleaf.core import ModelSpec, RopeKind, RopeSpec
from interleaf.errors import ModelRejected
from interleaf.model.spec import parse_spec

LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_7B_V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
FAMILIES = {"llama": LLAMA_32_1B, "mistral": MISTRAL_7B_V01, "qwen2": QWEN25_05B, "qwen3": QWEN3_06B}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return parse_spec(config | changes, "a model")


def problems(config: dict[str, Any], **changes: Any) -> tuple[str, ...]:
    with pytest.raises(ModelRejected, match=r"^a model: ") as caught:
        spec(config, **changes)
    return caught.value.problems


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


def test_llama_3_2_is_read_with_its_rope_scaling_and_its_three_end_tokens() -> None:
    assert spec(LLAMA_32_1B) == ModelSpec(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        max_position=131072,
        rope=RopeSpec(500000.0, RopeKind.LLAMA3, 32.0, 1.0, 4.0, 8192),
        tie_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_smollm2_derives_its_head_size_and_its_inert_fields_are_ignored() -> None:
    assert spec(SMOLLM2_135M).head_dim == 64
    assert spec(SMOLLM2_135M).rope == RopeSpec(theta=100000.0)


def test_mistral_keeps_a_window_that_hides_something_and_drops_one_that_does_not() -> None:
    assert spec(MISTRAL_7B_V01).sliding_window == 4096
    assert spec(MISTRAL_7B_V01, sliding_window=None).sliding_window is None
    assert spec(MISTRAL_7B_V01, sliding_window=32768).sliding_window is None
    assert spec(without(MISTRAL_7B_V01, "sliding_window")).sliding_window == 4096  # what transformers assumes


def test_qwen2_has_biases_on_q_k_v_alone_and_no_window() -> None:
    qwen2 = spec(QWEN25_05B)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert qwen2.sliding_window is None


def test_qwen3_normalises_q_and_k_and_takes_its_head_size_from_the_configuration() -> None:
    qwen3 = spec(QWEN3_06B)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_dim, qwen3.q_size) == (True, False, 128, 2048)


def test_llama_biases_follow_their_two_switches() -> None:
    biased = spec(LLAMA_32_1B, attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_may_be_given_by_model_type_alone(family: str) -> None:
    assert spec(without(FAMILIES[family], "architectures")) == spec(FAMILIES[family])


@pytest.mark.parametrize("config", [LLAMA_32_1B, SMOLLM2_135M], ids=["llama3", "default"])
def test_both_spellings_of_rope_mean_the_same(config: dict[str, Any]) -> None:
    new = without(config, "rope_theta", "rope_scaling")
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    new["rope_parameters"] = scaling | {"rope_theta": config["rope_theta"]}
    assert spec(new) == spec(config)


def test_linear_rope_is_read_in_the_oldest_spelling() -> None:
    rope = spec(SMOLLM2_135M, rope_scaling={"type": "linear", "factor": 4.0}).rope
    assert rope == RopeSpec(theta=100000.0, kind=RopeKind.LINEAR, factor=4.0)


def test_llama3_rope_without_an_original_length_takes_the_models_own() -> None:
    scaling = without(LLAMA_32_1B["rope_scaling"], "original_max_position_embeddings")
    assert spec(LLAMA_32_1B, rope_scaling=scaling).rope.original_max_position == 131072


def test_end_tokens_of_the_generation_config_are_added_once() -> None:
    generation = {"eos_token_id": [151645, 151643], "temperature": 0.7}
    assert spec(QWEN25_05B, generation_config=generation).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"type": "mrope", "mrope_section": [16, 24, 24]},
        {"rope_type": "default", "mrope_section": [16, 24, 24]},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": -1.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"full_attention": {"rope_type": "default"}},
        "linear",
    ],
    ids=str,
)
def test_rope_that_is_not_supported_or_malformed_is_refused(rope: Any) -> None:
    assert len(problems(SMOLLM2_135M, rope_scaling=rope)) == 1
    assert len(problems(without(SMOLLM2_135M, "rope_scaling"), rope_parameters=rope)) == 1


def test_two_ropes_that_differ_are_refused() -> None:
    rope = {"rope_type": "linear", "factor": 2.0}
    assert "differ" in problems(SMOLLM2_135M, rope_scaling=rope, rope_parameters=rope | {"factor": 4.0})[0]
    assert spec(SMOLLM2_135M, rope_scaling=rope, rope_parameters=rope).rope.factor == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", []),
        ("model_type", "llava"),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("auto_map", {"AutoModelForCausalLM": "modeling_mine.Mine"}),
        ("vision_config", {"hidden_size": 1024}),
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("attention_multiplier", 0.0078125),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("clip_qkv", 8.0),
        ("qk_norm", True),
        ("sliding_window", 1024),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("head_dim", 63),
        ("head_dim", 0),
        ("hidden_size", "576"),
        ("hidden_size", 577),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 2),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [2, -1]),
        ("bos_token_id", 1.5),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_field_that_changes_the_maths_or_is_malformed_is_refused_by_name(field: str, value: Any) -> None:
    (problem,) = problems(SMOLLM2_135M, **{field: value})
    assert field in problem


@pytest.mark.parametrize("field", ["partial_rotary_factor", "logit_scale", "residual_multiplier"])
def test_a_scale_of_one_changes_nothing_and_is_accepted(field: str) -> None:
    assert spec(SMOLLM2_135M, **{field: 1}) == spec(SMOLLM2_135M)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"])
def test_a_missing_size_is_named_and_gives_no_follow_up_problems(field: str) -> None:
    assert problems(without(LLAMA_32_1B, field)) == (f"{field} is missing",)


def test_qwen3_without_a_head_size_is_refused_since_its_default_is_not_derived() -> None:
    assert problems(without(QWEN3_06B, "head_dim")) == ("head_dim is missing",)


@pytest.mark.parametrize(("layers", "ok"), [(24, True), (28, True), (21, False), (0, False)])
def test_qwen_windows_are_refused_unless_no_layer_has_one(layers: int, ok: bool) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": layers}
    if ok:
        assert spec(QWEN25_05B, **changes) == spec(QWEN25_05B)
    else:
        assert len(problems(QWEN25_05B, **changes)) == 1


@pytest.mark.parametrize(
    ("family", "field"), [("mistral", "attention_bias"), ("qwen2", "mlp_bias"), ("qwen3", "mlp_bias")]
)
def test_biases_that_the_family_lacks_are_refused(family: str, field: str) -> None:
    assert problems(FAMILIES[family], **{field: True}) == (f"{field}=True is not supported for {family}",)


def test_all_problems_are_listed_at_once() -> None:
    found = problems(
        without(LLAMA_32_1B, "vocab_size", "num_attention_heads"),
        hidden_act="gelu",
        quantization_config={"bits": 4},
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    )
    assert len(found) == 5
    for word in ("vocab_size", "num_attention_heads", "hidden_act", "quantization_config", "yarn"):
        assert sum(word in problem for problem in found) == 1
