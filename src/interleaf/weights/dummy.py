"""Random weights for a configuration, by seed: for benchmarks and tests of shapes. Reads no weights.

A tensor depends on (seed, its name) alone, so ranks that cut different slices, in any order, hold one model. It is
another one on a GPU, where it is drawn in place: gigabytes in a second, which the host would take minutes for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from interleaf.errors import CheckpointError
from interleaf.weights.loader import read_config, read_json

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DummyCheckpoint:
    """The tensors that a folder's config.json (or a config.json alone) asks for, drawn at random.

    Matrices are normal with variance 1 / columns, which keeps activations and logits near 1 at any size; norms are 1.

    Raises: CheckpointError: the configuration cannot be read, or lacks a size.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.config: Mapping[str, Any] = read_config(path) if path.is_dir() else read_json(path)
        self._seed = seed
        declared = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if declared not in _DTYPES:
            raise CheckpointError(f"{path}: dtype {declared!r} is not one of {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[declared]

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        shape = self.shape(name)
        if name.endswith("norm.weight"):
            whole = torch.ones(shape, dtype=self.dtype)
        else:
            generator = torch.Generator().manual_seed(self._seed_of(name))
            whole = torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(self.dtype)
        index = (rows or slice(None),) if cols is None else (rows or slice(None), cols)
        # A copy, so that a slice does not keep the whole alive.
        return whole if rows is None and cols is None else whole[index].clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        if name not in self._shapes:
            raise CheckpointError(f"tensor {name} is not part of this configuration")
        return self._shapes[name]

    def fill(self, out: torch.Tensor, name: str, rows: slice | None = None, cols: slice | None = None) -> None:
        """Draw a tensor, or some of its rows and columns, where it is wanted and in the dtype that is wanted."""
        shape = self.shape(name)
        if name.endswith("norm.weight"):
            out.fill_(1)
            return
        is_whole = rows is None and cols is None
        whole = out if is_whole else out.new_empty(shape)
        generator = torch.Generator(out.device).manual_seed(self._seed_of(name))
        whole.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        if not is_whole:
            out.copy_(whole[rows or slice(None)] if cols is None else whole[rows or slice(None), cols])

    def close(self) -> None:
        pass

    def _seed_of(self, name: str) -> int:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return _shapes(self.config)


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or [""]
    return str(config.get("model_type") or architectures[0].removesuffix("ForCausalLM").lower())


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Llama, Mistral, Qwen2 or Qwen3 model."""

    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a whole number >= 1, got {value!r}")
        return value

    hidden, heads, intermediate = size("hidden_size"), size("num_attention_heads"), size("intermediate_size")
    kv_heads = size("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    head_dim = size("head_dim") if config.get("head_dim") is not None else hidden // heads
    q, kv, family = heads * head_dim, kv_heads * head_dim, _family(config)

    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    qkv = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    o = {"self_attn.o_proj": (hidden, q)}
    gate_up = {"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden)}
    mlp = gate_up | {"mlp.down_proj": (hidden, intermediate)}
    attention_bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
    for linears, biased in (
        (qkv, attention_bias or family == "qwen2"),
        (o, attention_bias),
        (mlp, bool(config.get("mlp_bias")) and family == "llama"),
    ):
        layer |= {f"{name}.weight": shape for name, shape in linears.items()}
        layer |= {f"{name}.bias": shape[:1] for name, shape in linears.items() if biased}
    if family == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}

    shapes = {"model.embed_tokens.weight": (size("vocab_size"), hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for index in range(size("num_hidden_layers")):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
