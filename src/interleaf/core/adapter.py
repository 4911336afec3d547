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


STACK_ROWS = 16
"""Rows of A in a block of a stream in `StreamOrder.TILES`."""


class StreamOrder(Enum):
    """How a group's matrices are laid down inside their part of a stream. Sizes and offsets are the same in both.

    ROWS: every matrix row-major. What is best on a CPU.
    TILES: rows are cut into tiles of `StreamLayout.tile` elements; tiles that a kernel reads together are neighbours.
        All A of a group are one stack of rows, cut into blocks of `STACK_ROWS` (the last may be lower): block after
        block, [in / tile, rows of the block, tile]. Each B transposed is [out / tile, rank, tile]. Best on a GPU.

    Source: docs/adr/0010-image-order-per-device.md.
    """

    ROWS = "rows"
    TILES = "tiles"


@dataclass(frozen=True, slots=True)
class ModuleSpan:
    """Where one module's A and B lie inside a layer's stream.

    A is [rank, in] and B, transposed, is [rank, out], both row-major; `in` and `out` are this rank's widths. (In
    `StreamOrder.TILES` the elements are permuted inside a group's stack of A and inside a B, and nowhere else.)

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

    Attributes:
        tile: elements of a tile; they divide the lane and every width. Only `StreamOrder.TILES` has tiles.
    """

    spans: tuple[ModuleSpan, ...]
    elems: int
    order: StreamOrder = StreamOrder.ROWS
    tile: int = 1

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
