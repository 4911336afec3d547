"""An adapter that has been read and checked: its pairs, its identity, its numbers. Knows no file format and no page."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from interleaf.core import AdapterUid, Module

ModuleAt = tuple[int, Module]
"""A module of a layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """One module's weight change, scale * b @ a.

    Attributes:
        a: [rank, in], as stored.
        b: [out, rank], as stored, not scaled.
        bounds: no magnitude in `a`, none in `b` is larger; None: nobody has looked.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    bounds: tuple[float, float] | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def checked_bounds(self) -> tuple[float, float]:
        """The bounds; looked for if nobody has."""
        return self.bounds or (largest(self.a), largest(self.b))


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What an adapter is, in numbers.

    Attributes:
        ranks: the distinct ranks, ascending.
        targets: the modules that it changes in at least one layer.
        num_layers: layers that it changes.
        dtypes: of the tensors as stored.
        stored_bytes: of the tensors as stored.
    """

    uid: AdapterUid
    source: str
    ranks: tuple[int, ...]
    targets: tuple[Module, ...]
    num_layers: int
    dtypes: tuple[str, ...]
    stored_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ParsedAdapter:
    """An adapter that fits its model: every tensor of its source is in `pairs`, finite and of the right shape."""

    uid: AdapterUid
    pairs: Mapping[ModuleAt, LoraPair]
    source: str

    @property
    def ranks(self) -> dict[ModuleAt, int]:
        return {at: pair.rank for at, pair in self.pairs.items()}

    def summary(self) -> AdapterSummary:
        tensors = [t for pair in self.pairs.values() for t in (pair.a, pair.b)]
        touched = {module for _, module in self.pairs}
        return AdapterSummary(
            uid=self.uid,
            source=self.source,
            ranks=tuple(sorted(set(self.ranks.values()))),
            targets=tuple(module for module in Module if module in touched),
            num_layers=len({layer for layer, _ in self.pairs}),
            dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
            stored_bytes=sum(t.nbytes for t in tensors),
        )


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; NaN or infinite if any value is."""
    low, high = (value.item() for value in torch.aminmax(tensor))
    return math.nan if math.isnan(low) else max(-low, high)


def digest(pairs: Mapping[ModuleAt, LoraPair]) -> AdapterUid:
    """The identity of an adapter with these tensors and scales."""
    sha = hashlib.sha256(b"interleaf lora v1\n")
    for (layer, module), pair in sorted(pairs.items()):
        sha.update(f"{layer} {module} {pair.scale.hex()}\n".encode())
        for tensor in (pair.a, pair.b):
            sha.update(_type_line(tensor.dtype, tensor.shape))
            # numpy knows no bfloat16.
            values = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
            sha.update(values.contiguous().numpy().data)
    return AdapterUid(sha.hexdigest())


@lru_cache(maxsize=256)
def _type_line(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype} {tuple(shape)}\n".encode()
