"""From a config.json to a ModelSpec, or to the list of everything in it that is not supported. Reads no file.

A field that is not listed here has no part in the forward pass of these four families. Those that have one in some
relative of the family (a mixture of experts, a soft cap, a scaled residual ...) are refused wherever they are set:
serving such a model as a plain one would give fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interleaf.core import ModelSpec, RopeKind, RopeSpec
from interleaf.errors import ModelRejected
from interleaf.model.config_fields import ConfigFields

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Fields that change the mathematics, and the values (beside absent and null) at which they do not.
_CHANGES_THE_MATHS: dict[str, tuple[object, ...]] = {
    # weights are not what they seem
    "quantization_config": (),
    "compression_config": (),
    "auto_map": (),  # the model is defined by code that lies beside it
    # another kind of model
    "vision_config": (),
    "audio_config": (),
    "text_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "num_experts_per_tok": (0,),
    "moe_intermediate_size": (),
    # positions
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "alibi": (False,),
    "position_embedding_type": ("rope", "rotary", "absolute"),  # "absolute" is an old default that nothing reads
    # attention
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "clip_qkv": (),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    # scales and caps
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "scale_depth": (),
    "lm_head_bias": (False,),
}
_ROPE_KEYS = {
    RopeKind.DEFAULT: frozenset[str](),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    ),
}


def parse_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a config.json describes.

    Args:
        config: its fields, in the spelling of any transformers release (`rope_parameters`, or `rope_theta` and
            `rope_scaling`). End tokens under the key "generation_config", if any, are added to the model's own.
        name: of the model, for messages.

    Raises: ModelRejected: lists every field that is missing, malformed or not supported.
    """
    fields = ConfigFields(config)
    family = _family(fields)
    _refuse_relatives(fields, family)

    hidden, heads, layers = (fields.size(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = fields.size("num_key_value_heads", default=heads if family == "llama" else None)
    if fields.usable("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        fields.refuse(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    head_dim = _head_dim(fields, family, hidden, heads)
    max_position = fields.size("max_position_embeddings")
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    spec = ModelSpec(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.real("rms_norm_eps", default=1e-6),
        max_position=max_position,
        rope=_rope(fields, max_position),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(fields, family, layers, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
    )
    if fields.problems:
        raise ModelRejected(name, list(dict.fromkeys(fields.problems)))
    return spec


def _family(fields: ConfigFields) -> str:
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    supported = ", ".join(_FAMILIES)
    if architectures is None and model_type in _FAMILIES.values():
        return str(model_type)
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _FAMILIES:
        fields.refuse(f"architectures={architectures!r} is not supported, supported are {supported}")
        return "llama"
    family = _FAMILIES[architectures[0]]
    if model_type is not None and model_type != family:
        fields.refuse(f"model_type={model_type!r} contradicts architectures={architectures!r}")
    return family


def _head_dim(fields: ConfigFields, family: str, hidden: int, heads: int) -> int:
    # Qwen3's own default is 128 whatever the hidden size: derived, an omission would go unnoticed until the weights.
    if fields.get("head_dim") is None and family != "qwen3":
        if fields.usable("hidden_size", "num_attention_heads") and hidden % heads:
            fields.refuse(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and head_dim is missing"
            )
            return 2
        head_dim = max(hidden // heads, 1)
    else:
        head_dim = fields.size("head_dim")
    if fields.usable("hidden_size", "num_attention_heads") and head_dim % 2:
        fields.refuse(f"head_dim={head_dim} must be even, as rotary embedding turns pairs")
    return head_dim


def _refuse_relatives(fields: ConfigFields, family: str) -> None:
    for key, neutral in _CHANGES_THE_MATHS.items():
        value = fields.get(key)
        if value is not None and not any(
            value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
        ):
            shown = "..." if isinstance(value, Mapping) else value
            fields.refuse(f"{key}={shown!r} is not supported" if shown is value else f"{key} is not supported")
    if (activation := fields.get("hidden_act")) not in ("silu", "swish", None):
        fields.refuse(f"hidden_act={activation!r} is not supported, only 'silu'")
    # Biases that transformers would leave out of the family's layers even if the checkpoint holds them.
    for key, families in (("attention_bias", ("llama", "qwen2", "qwen3")), ("mlp_bias", ("llama",))):
        if family not in families and fields.flag(key):
            fields.refuse(f"{key}=True is not supported for {family}")
    if family != "qwen3" and any(fields.get(key) for key in ("qk_norm", "use_qk_norm", "qk_layernorm")):
        fields.refuse(f"normalised q and k (qk_norm) are not supported for {family}")


def _rope(fields: ConfigFields, max_position: int) -> RopeSpec:
    """transformers 5 keeps all of it in `rope_parameters`, earlier ones in `rope_theta` and `rope_scaling`."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new.config and old.config and new.config != old.config:
        fields.refuse("rope_parameters and rope_scaling are both set, and differ")
    rope = new if new.config else old
    theta = (rope if rope.get("rope_theta") is not None else fields).real("rope_theta", default=10_000.0)

    # Older configurations say "type"; some say both.
    kind_name = rope.get("rope_type") or rope.get("type") or RopeKind.DEFAULT
    if kind_name not in list(RopeKind):
        rope.refuse(f"rope_type={kind_name!r} is not supported, supported are {', '.join(RopeKind)}")
        return RopeSpec(theta=theta)
    kind = RopeKind(kind_name)
    known = _ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta"}
    if rope.get("partial_rotary_factor") == 1.0:
        known |= {"partial_rotary_factor"}
    if kind is not RopeKind.LLAMA3:
        known |= {"original_max_position_embeddings"}  # says how the model was trained, changes nothing
    for key in rope.config:
        if key not in known and rope.get(key) is not None:
            rope.refuse(f"{key}={rope.get(key)!r} of rope type {kind.value!r} is not supported")
    match kind:
        case RopeKind.DEFAULT:
            return RopeSpec(theta=theta)
        case RopeKind.LINEAR:
            return RopeSpec(theta=theta, kind=kind, factor=rope.real("factor"))
    # Some keep the original length beside the section, and transformers then prefers that one.
    length = fields if fields.get("original_max_position_embeddings") is not None else rope
    spec = RopeSpec(
        theta=theta,
        kind=kind,
        factor=rope.real("factor"),
        low_freq_factor=rope.real("low_freq_factor"),
        high_freq_factor=rope.real("high_freq_factor"),
        original_max_position=length.size("original_max_position_embeddings", default=max_position),
    )
    if spec.high_freq_factor <= spec.low_freq_factor:
        rope.refuse(f"high_freq_factor={spec.high_freq_factor} must be above low_freq_factor={spec.low_freq_factor}")
    return spec


def _sliding_window(fields: ConfigFields, family: str, layers: int, max_position: int) -> int | None:
    """The window, if it hides anything: one as long as the model's context does not."""
    declared = fields.get("sliding_window")
    if declared is None and "sliding_window" not in fields.config and family != "llama":
        declared = 4096  # what transformers assumes; null is how a configuration says "none"
    window = None if declared is None else fields.size("sliding_window", default=declared)
    if window is not None and window >= max_position:
        window = None
    if family in ("qwen2", "qwen3"):
        # Layers from max_window_layers on slide: a mix of layers, for which there is no switch.
        if window is not None and fields.flag("use_sliding_window"):
            sliding_layers = layers - fields.size("max_window_layers", default=28, least=0)
            if sliding_layers > 0:
                fields.refuse(f"sliding_window={window} in {sliding_layers} of {layers} layers is not supported")
        window = None
    elif family == "llama" and window is not None:
        fields.refuse(f"sliding_window={window} is not supported for llama")
    kinds = fields.get("layer_types")
    if kinds is not None:
        allowed = {"full_attention"} if window is None else {"sliding_attention"}
        if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
            fields.refuse(f"layer_types={kinds!r} is not supported, only {allowed.pop()!r} throughout")
    return window


def _eos_token_ids(fields: ConfigFields) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id") + fields.section("generation_config").token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
