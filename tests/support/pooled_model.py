"""A Transformer over a small pool, driven row by row. Knows neither plans nor requests; its pages are scattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from interleaf.attention import AttentionRows, ChunkRows, TorchSdpa
from interleaf.core import ModelSpec
from interleaf.kernels import LoraWork
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.page_table import PageTable
from interleaf.memory.pool import PagePool
from interleaf.model.spec import parse_spec
from interleaf.model.transformer import Batch, Transformer
from interleaf.parallel.shard import Shard


class DictCheckpoint:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        tensor = tensor if rows is None else tensor[rows]
        return tensor if cols is None else tensor[:, cols]


def spec_of(model: PreTrainedModel) -> ModelSpec:
    return parse_spec(model.config.to_dict(), "tiny")


def checkpoint_of(model: PreTrainedModel) -> DictCheckpoint:
    """The tensors that `save_pretrained` would write."""
    tied = model.config.tie_word_embeddings
    return DictCheckpoint({n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")})


def load(model: PreTrainedModel, dtype: torch.dtype = torch.float32, **settings: Any) -> Transformer:
    spec = spec_of(model)
    return Transformer.load(spec, Shard(spec), checkpoint_of(model), dtype, **settings)


def pool_for(spec: ModelSpec, page_tokens: int, num_pages: int, dtype: torch.dtype = torch.float32) -> PagePool:
    geometry = PageGeometry(page_tokens, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype.itemsize)
    return PagePool(geometry, num_pages, dtype)


class PooledModel:
    """Sequences are numbered from 0; each starts when it is first named."""

    def __init__(self, model: Transformer, page_tokens: int = 4, fill: float = float("nan")) -> None:
        self.model = model
        num_pages = 400 // page_tokens + 20
        self.pool = pool_for(model.spec, page_tokens, num_pages, model.dtype)
        self.pool.data.fill_(fill)
        self.attention = TorchSdpa(self.pool, model.spec.sliding_window)
        self.table = PageTable(8, page_tokens)
        self.free = np.random.default_rng(3).permutation(num_pages).tolist()

    def step(
        self,
        decode: Sequence[tuple[int, int]] = (),
        chunks: Sequence[tuple[int, Sequence[int]]] = (),
        sampled: Sequence[int] | None = None,
        lora: LoraWork | None = None,
    ) -> torch.Tensor:
        """Logits of (sequence, token) and (sequence, tokens), in that order; all rows, or the `sampled` ones."""
        rows = [(s, int(self.table.lengths[s]), t) for s, t in decode]
        rows += [(s, int(self.table.lengths[s]) + i, t) for s, tokens in chunks for i, t in enumerate(tokens)]
        for seat, position, _ in rows:
            if position // self.table.page_tokens >= self.table.num_pages[seat]:
                self.table.grow(seat, (self.free.pop(),))
        seats, positions, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
        runs = tuple(ChunkRows(s, int(self.table.lengths[s]), len(tokens)) for s, tokens in chunks)
        attention = self.attention.prepare(AttentionRows(self.table, np.array([s for s, _ in decode], dtype=int), runs))
        chosen = None if sampled is None else torch.tensor(sampled)
        logits = self.model.forward(Batch(tokens, positions, attention, chosen, lora), self.pool.data)
        for seat in seats.tolist():
            self.table.lengths[seat] += 1
        return logits
