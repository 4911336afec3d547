"""What an adapter is once it has been laid out: an identity, and where its matrices lie in its stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from interleaf.core.model import MODULE_GROUP, LoraGroup, Module

AdapterUid = NewType("AdapterUid", str)
"""Identity of an adapter: the hex sha256 of its tensors and meaning-bearing configuration. Never a name."""


class HostState(Enum):
    """Where an adapter's image stands with host memory."""

    READY = "ready"
    FETCHING = "fetching"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModuleSpan:
    """Where one module's A and B lie inside a layer's stream.

    A is [rank, in] and B, transposed, is [rank, out], both row-major; `in` and `out` are this rank's widths.

    Attributes:
        a_first, b_first: element offsets in the stream.
        out_first: first column of the module in its group's fused output.
    """

    module: Module
    rank: int
    in_features: int
    out_features: int
    a_first: int
    b_first: int
    out_first: int

    @property
    def a_elems(self) -> int:
        return self.rank * self.in_features

    @property
    def b_elems(self) -> int:
        return self.rank * self.out_features


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """The order of one layer's matrices in its stream: group after group, all A of a group, then all B.

    Source: docs/adr/0002-page-geometry.md.
    """

    spans: tuple[ModuleSpan, ...]
    elems: int

    def group(self, group: LoraGroup) -> tuple[ModuleSpan, ...]:
        """The spans of one group in column order; empty if the adapter targets none of its modules."""
        return tuple(s for s in self.spans if MODULE_GROUP[s.module] is group)


@dataclass(frozen=True, slots=True)
class PooledLayout:
    """Where everything of one adapter lies, on one rank.

    Layers with the same ranks share a layout, so that records built for one layer serve them all.

    Attributes:
        layouts: the distinct layouts.
        layer_layout: for each layer an index into `layouts`, or None where the adapter does not touch the layer.
        pages: pages that the adapter takes.
        used_bytes: bytes of A and B, the rest of the pages being rounding and lanes of untouched layers.
    """

    layouts: tuple[StreamLayout, ...]
    layer_layout: tuple[int | None, ...]
    pages: int
    used_bytes: int
