"""Lays an adapter out as its pages will hold it, one image per rank. Touches no device and no pool.

Scale is folded into B in float32, before anything is rounded to the pool's dtype.
Source: docs/adr/0002-page-geometry.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.adapters.parsed import LoraPair, ModuleAt, ParsedAdapter
from interleaf.adapters.problems import Problems
from interleaf.core import (
    GROUP_MODULES,
    STACK_ROWS,
    LoraGroup,
    Module,
    ModuleSpan,
    PooledLayout,
    StreamLayout,
    StreamOrder,
)
from interleaf.errors import AdapterRejected, ConfigError
from interleaf.memory.geometry import MIN_TILE, PageGeometry
from interleaf.parallel.shard import Shard

IMAGE_VERSION = 1
"""Goes up when `build` makes other bytes of the same adapter and layout: images are kept on disk across releases."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterImage:
    """An adapter as its pages hold it.

    Attributes:
        data: [pages, layers, lane_elems] in the pool's dtype: row i is what the adapter's i-th page becomes. Layer l's
            stream runs through data[:, l], page after page; what it does not reach is zero.
    """

    layout: PooledLayout
    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


def require_tile(shard: Shard, geometry: PageGeometry) -> int:
    """Elements of a tile of every adapter's stream on this rank; checked once, when an engine starts.

    Raises: ConfigError: below 16, so that kernels could not read whole tiles.
    """
    tile = geometry.tile(shard.widths())
    if tile < MIN_TILE:
        raise ConfigError(
            f"a tile must have at least {MIN_TILE} elements and would have {tile}: the largest power of two that "
            f"divides a lane ({geometry.lane_elems} elements) and every width of this rank's layers "
            f"({', '.join(map(str, sorted(shard.widths())))})"
        )
    return tile


def layout_of(
    ranks: Mapping[ModuleAt, int], shard: Shard, geometry: PageGeometry, order: StreamOrder = StreamOrder.ROWS
) -> PooledLayout:
    """Where the matrices of an adapter with those ranks lie on this rank; modules that are absent are not targeted."""
    tile = geometry.tile(shard.widths()) if order is StreamOrder.TILES else 1
    layouts: dict[tuple[tuple[Module, int], ...], int] = {}
    streams: list[StreamLayout] = []
    layer_layout: list[int | None] = []
    for layer in range(geometry.num_layers):
        wanted = tuple((module, ranks[layer, module]) for module in Module if (layer, module) in ranks)
        if wanted and wanted not in layouts:
            layouts[wanted] = len(streams)
            streams.append(_stream(dict(wanted), shard, order, tile))
        layer_layout.append(layouts.get(wanted))
    elems = [streams[index].elems for index in layer_layout if index is not None]
    return PooledLayout(
        layouts=tuple(streams),
        layer_layout=tuple(layer_layout),
        pages=geometry.pages_for_stream(max(elems, default=0)),
        used_bytes=sum(elems) * geometry.itemsize_bytes,
    )


def _stream(ranks: Mapping[Module, int], shard: Shard, order: StreamOrder, tile: int) -> StreamLayout:
    spans: list[ModuleSpan] = []
    first = 0
    for group in LoraGroup:
        modules = [module for module in GROUP_MODULES[group] if module in ranks]
        a_first: dict[Module, int] = {}
        for module in modules:
            a_first[module] = first
            first += ranks[module] * shard.in_span(module).count
        for module in modules:
            span = ModuleSpan(
                module=module,
                rank=ranks[module],
                in_features=shard.in_span(module).count,
                out_features=shard.out_span(module).count,
                a_first=a_first[module],
                b_first=first,
                out_first=shard.out_first(module),
            )
            first += span.b_elems
            spans.append(span)
    return StreamLayout(tuple(spans), first, order, tile)


def build(
    parsed: ParsedAdapter,
    shard: Shard,
    geometry: PageGeometry,
    dtype: torch.dtype,
    order: StreamOrder = StreamOrder.ROWS,
) -> AdapterImage:
    """Cut an adapter for this rank and lay it out, in the order that the device's kernels want.

    Raises: AdapterRejected: a value is beyond the largest of `dtype` (float16 ends at 65504).
    """
    layout = layout_of(parsed.ranks, shard, geometry, order)
    data = torch.zeros(layout.pages, geometry.num_layers, geometry.lane_elems, dtype=dtype)
    stream = torch.zeros(layout.pages * geometry.lane_elems, dtype=dtype)
    problems = Problems()
    for layer, index in enumerate(layout.layer_layout):
        if index is None:
            continue
        for span in layout.layouts[index].spans:
            _fill(stream, span, parsed.pairs[layer, span.module], shard)
        elems = layout.layouts[index].elems
        if not _is_finite(stream[:elems]):
            _tell_infinite(stream, layout.layouts[index], layer, problems)
        if order is StreamOrder.TILES:
            _to_tiles(stream, layout.layouts[index])
        stream[elems:] = 0  # what a longer stream of the layer before has left
        data[:, layer] = stream.view(layout.pages, -1)
    if problems:
        raise AdapterRejected(parsed.source, list(problems))
    return AdapterImage(layout, data)


def _fill(stream: torch.Tensor, span: ModuleSpan, pair: LoraPair, shard: Shard) -> None:
    """Write one module's A, [rank, in], and scaled B transposed, [rank, out], into a layer's stream."""
    a = stream[span.a_first :][: span.a_elems].view(span.rank, span.in_features)
    a.copy_(pair.a[:, shard.in_span(span.module).as_slice()])
    b = stream[span.b_first :][: span.b_elems].view(span.rank, span.out_features)
    # numpy transposes matrices of so few columns several times faster than torch.
    stored = pair.b[shard.out_span(span.module).as_slice()].float().numpy()
    b.copy_(torch.from_numpy(np.multiply(stored.T, np.float32(pair.scale), order="C")))


def _is_finite(values: torch.Tensor) -> bool:
    return all(math.isfinite(value.item()) for value in torch.aminmax(values))


def _tell_infinite(stream: torch.Tensor, layout: StreamLayout, layer: int, problems: Problems) -> None:
    """Say which matrices of a layer the stream's dtype cannot hold."""
    limit = torch.finfo(stream.dtype).max
    for span in layout.spans:
        for half, first, elems in (("A", span.a_first, span.a_elems), ("B", span.b_first, span.b_elems)):
            if not _is_finite(stream[first : first + elems]):
                scaled = " times the scale" if half == "B" else ""
                what = f"lora_{half}{scaled} has values beyond {limit:g}, the largest of the pool's {stream.dtype}"
                problems.group(what, f"layer {layer} {span.module}")


def _to_tiles(stream: torch.Tensor, layout: StreamLayout) -> None:
    """Permute a layer's stream from `StreamOrder.ROWS` to `StreamOrder.TILES`, in place."""
    for group in LoraGroup:
        spans = layout.group(group)
        if not spans:
            continue
        stack = sum(span.rank for span in spans)
        width, first = spans[0].in_features, spans[0].a_first
        for row in range(0, stack, STACK_ROWS):
            _cut(stream[first + row * width :], min(STACK_ROWS, stack - row), width, layout.tile)
        for span in spans:
            _cut(stream[span.b_first :], span.rank, span.out_features, layout.tile)


def _cut(matrix: torch.Tensor, rows: int, width: int, tile: int) -> None:
    """Turn [rows, width] into [width / tile, rows, tile], in place."""
    flat = matrix[: rows * width]
    flat.copy_(flat.view(rows, width // tile, tile).transpose(0, 1).reshape(-1))
