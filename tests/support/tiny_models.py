"""Small random models of every family, as Hugging Face folders without a tokenizer. Knows nothing of Interleaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # below the tests' lengths and wavelengths, so that scaling matters
}


def _llama2() -> PreTrainedModel:
    shape = SHAPE | {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))


def _llama3() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8, tie_word_embeddings=False))


def _qwen2() -> PreTrainedModel:
    # Qwen2 has no head_dim of its own: hidden_size / heads.
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))


def _qwen3() -> PreTrainedModel:
    # Heads wider than hidden_size / heads, as in the real small Qwen3.
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 32}, tie_word_embeddings=True))


FAMILIES = {"llama2-linear": _llama2, "llama3": _llama3, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}


@torch.no_grad()
def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random float32 model whose greedy outputs vary: weights are far larger than a training's initial ones."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().float().eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.3 if "embed" in name else 1.5 * weight.shape[1] ** -0.5)
        elif name.endswith("bias"):
            weight.normal_(std=0.5)
        else:
            weight.uniform_(0.5, 1.5)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return model


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """Write config.json and safetensors, as transformers does."""
    model.save_pretrained(folder)
    return folder
