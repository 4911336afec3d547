"""What a tensor's name in a PEFT file says: a half (A or B) of one module of one layer, or something unsupported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from interleaf.core import Module


class Half(StrEnum):
    """A, [rank, in], or B, [out, rank]."""

    A = "A"
    B = "B"


@dataclass(frozen=True, slots=True)
class TensorKey:
    """A name that was understood. `prefix` is what precedes "layers" in the full name of the trained model's module."""

    prefix: str
    layer: int
    module: Module
    half: Half


# What PEFT writes is base_model.model.<module>.lora_A.weight. Understood beside it, because each can mean one thing
# only: no base_model.model. in front, the adapter's name left in by a plain state_dict(), the names lora_down and
# lora_up, the decoder as part of a multimodal model or by itself. PEFT loads some of these without any effect.
_KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<prefix>(?:model\.)?(?:language_model\.(?:model\.)?)?)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,8})\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>(?:gate|up|down)_proj))\."
    r"(?:(?P<a>lora_A|lora_down)|lora_B|lora_up)(?:\.default)?\.weight"
)

_MAX_NAME_CHARS = 200
"""More than any name that is understood."""

_UNSUPPORTED = (
    (r"\.base_layer\.", "tensors are a copy of the base model's weights"),
    (r"lora_magnitude_vector", "tensors belong to DoRA"),
    (
        r"lora_embedding_[AB]|(?:^|\.)(?:lm_head|embed_tokens)(?:\.|$)",
        "tensors adapt or replace lm_head or embed_tokens",
    ),
    (r"lora_[AB](?:\.default)?\.bias$", "tensors are biases (lora_bias)"),
    (r"modules_to_save|trainable_tokens", "tensors replace modules of the model"),
    (r"ia3_|vera_|hada_|lokr_|oft_|lora_E(?:\.|$)|prompt_embeddings", "tensors belong to another method than LoRA"),
)


def parse_key(name: str) -> TensorKey | None:
    """Understand a tensor's name; None if it is not a half of a LoRA pair of a decoder layer."""
    return None if len(name) > _MAX_NAME_CHARS else _parse_key(name)


@lru_cache(maxsize=8192)  # all adapters of a model have the same names
def _parse_key(name: str) -> TensorKey | None:
    match = _KEY.fullmatch(name)
    if match is None:
        return None
    module = Module(match["attention"] or match["mlp"])
    return TensorKey(match["prefix"], int(match["layer"]), module, Half.A if match["a"] else Half.B)


def why_unsupported(name: str) -> str:
    """The kind of problem that a name stands for which `parse_key` did not understand."""
    for pattern, why in _UNSUPPORTED:
        if re.search(pattern, name):
            return f"unsupported: {why}"
    return "tensors fit no module of this model"
