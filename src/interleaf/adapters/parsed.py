"""An adapter that has been read and checked: its pairs, its identity, its numbers. Knows no file format and no page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


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


def digest(pairs: Mapping[ModuleAt, LoraPair]) -> AdapterUid:
    """The identity of an adapter with these tensors and scales."""
    sha = hashlib.sha256(b"interleaf lora v1\n")
    for (layer, module), pair in sorted(pairs.items()):
        sha.update(f"{layer} {module} {pair.scale.hex()}\n".encode())
        for tensor in (pair.a, pair.b):
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            sha.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return AdapterUid(sha.hexdigest())
