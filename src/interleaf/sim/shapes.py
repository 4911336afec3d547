"""What a model and its adapters weigh, from their shapes. Knows no device and reads no weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from interleaf.config import PAGE_TOKENS
from interleaf.core import ModelSpec, Module
from interleaf.errors import ConfigError, ModelRejected
from interleaf.memory.geometry import PageGeometry
from interleaf.model.spec import parse_spec
from interleaf.parallel.shard import Shard


def _llama(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, max_position: int, family: str = "llama"
) -> ModelSpec:
    return ModelSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        rms_norm_eps=1e-5,
        max_position=max_position,
    )


MODELS = {
    "llama2-7b": _llama(32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama2-13b": _llama(32_000, 5120, 40, 40, 40, 13_824, 4096),
    "llama2-70b": _llama(32_000, 8192, 80, 64, 8, 28_672, 4096),
    "llama3-8b": _llama(128_256, 4096, 32, 32, 8, 14_336, 8192),
    "llama3-70b": _llama(128_256, 8192, 80, 64, 8, 28_672, 8192),
    "mistral-7b": _llama(32_000, 4096, 32, 32, 8, 14_336, 32_768, "mistral"),
    "qwen2.5-7b": _llama(152_064, 3584, 28, 28, 4, 18_944, 32_768, "qwen2"),
}
"""Shapes by name, from the models' own config.json."""

TARGETS = {
    "all": tuple(Module),
    "attention": (Module.Q, Module.K, Module.V, Module.O),
    "qv": (Module.Q, Module.V),
}


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """One adapter on one rank.

    Attributes:
        num_bytes: of A and B; what a step reads of it.
        pages: that it takes in the pool; a copy moves whole pages.
    """

    num_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One rank's share of a model.

    Attributes:
        weight_bytes: of base weights held.
        read_bytes: of base weights read in a step: all but the embedding table, which is looked up by row.
        flops_per_row: multiply-adds count twice; attention's own, which grow with the context, are left out.
    """

    spec: ModelSpec
    geometry: PageGeometry
    shard: Shard
    weight_bytes: int
    read_bytes: int
    flops_per_row: float

    def adapter(self, rank: int, modules: Iterable[Module] = TARGETS["all"]) -> AdapterShape:
        """An adapter with that rank on those modules of every layer."""
        elems = sum(rank * (self.shard.in_span(m).count + self.shard.out_span(m).count) for m in modules)
        return AdapterShape(
            num_bytes=elems * self.spec.num_layers * self.geometry.itemsize_bytes,
            pages=self.geometry.pages_for_stream(elems),
        )


def model_shape(model: str, *, page_tokens: int = 16, world: int = 1, itemsize_bytes: int = 2) -> ModelShape:
    """The first rank's share of a model, by its name or the path of its config.json.

    Args: world: GPUs that share the model by tensor parallelism. itemsize_bytes: of an element, 2 for bf16.
    Raises: ConfigError: no such model, or it cannot be divided or paged so. ModelRejected: the engine could not run it.
    """
    if page_tokens not in PAGE_TOKENS:
        raise ConfigError(f"page_tokens must be one of {', '.join(map(str, PAGE_TOKENS))}, got {page_tokens}")
    spec = MODELS[model] if model in MODELS else _read_config(model)
    shard = Shard(spec, 0, world)
    layer = sum(shard.in_span(m).count * shard.out_span(m).count for m in Module)
    head = spec.vocab_size * spec.hidden_size // world
    read = spec.num_layers * layer + head
    return ModelShape(
        spec=spec,
        geometry=PageGeometry(page_tokens, spec.num_layers, shard.kv_heads.count, spec.head_dim, itemsize_bytes),
        shard=shard,
        weight_bytes=(read + (0 if spec.tie_embeddings else head)) * itemsize_bytes,
        read_bytes=read * itemsize_bytes,
        flops_per_row=2.0 * read,
    )


def _read_config(model: str) -> ModelSpec:
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, or a config.json; got {model!r}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelRejected(model, ["config.json is not an object"])
    return parse_spec(config, model)
