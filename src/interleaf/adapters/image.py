"""Lays an adapter out as its pages will hold it, one image per rank. Touches no device and no pool.

Source: docs/adr/0002-page-geometry.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.adapters.parsed import LoraPair, ModuleAt, ParsedAdapter
from interleaf.adapters.problems import Problems
from interleaf.adapters.stream import places, share_of_a, share_of_b
from interleaf.core import (
    GROUP_MODULES,
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


@dataclass(frozen=True, slots=True, eq=False)
class ImageDraft:
    """An image whose adapter fits, and which is still to be made.

    Attributes:
        shape: of the image's data: pages, layers, elements of a lane.
    """

    layout: PooledLayout
    shape: tuple[int, int, int]
    dtype: torch.dtype
    _pairs: Mapping[ModuleAt, LoraPair]
    _shard: Shard

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def parts(self, layers: int) -> Iterator[torch.Tensor]:
        """The image so many layers at a time (of the last part, fewer): each [pages, layers, lane_elems].

        A part is good until the next one is asked for: all are made in the same memory. Parts of one layer are made in
        place, longer ones take another copy.
        """
        pages, num_layers, lane_elems = self.shape
        whole = torch.empty(pages, layers, lane_elems, dtype=self.dtype)
        stream = whole.view(-1) if layers == 1 else torch.empty(pages * lane_elems, dtype=self.dtype)
        places_of = [places(stream, layout, self._shard) for layout in self.layout.layouts]
        dirty = len(stream)  # elements from the first that may not be zero
        for first in range(0, num_layers, layers):
            part = whole[:, : num_layers - first]
            for at, index in enumerate(self.layout.layer_layout[first : first + layers]):
                elems = 0 if index is None else self.layout.layouts[index].elems
                if index is not None:
                    for place in places_of[index]:
                        place.fill(self._pairs[first + at, place.module])
                stream[elems:dirty] = 0
                dirty = elems
                if layers > 1:
                    part[:, at] = stream.view(pages, lane_elems)
            yield part


def draft(
    parsed: ParsedAdapter,
    shard: Shard,
    geometry: PageGeometry,
    dtype: torch.dtype,
    order: StreamOrder = StreamOrder.ROWS,
) -> ImageDraft:
    """Cut an adapter for this rank and say how it is laid out, in the order that the device's kernels want.

    Raises: AdapterRejected: a value is beyond the largest of `dtype` (float16 ends at 65504).
    """
    layout = layout_of(parsed.ranks, shard, geometry, order)
    problems = Problems()
    for layer, index in enumerate(layout.layer_layout):
        for span in () if index is None else layout.layouts[index].spans:
            _check_range(parsed.pairs[layer, span.module], span.module, layer, shard, dtype, problems)
    if problems:
        raise AdapterRejected(parsed.source, list(problems))
    shape = (layout.pages, geometry.num_layers, geometry.lane_elems)
    return ImageDraft(layout, shape, dtype, parsed.pairs, shard)


def build(
    parsed: ParsedAdapter,
    shard: Shard,
    geometry: PageGeometry,
    dtype: torch.dtype,
    order: StreamOrder = StreamOrder.ROWS,
) -> AdapterImage:
    """Make an adapter's image. Arguments and errors are those of `draft`."""
    made = draft(parsed, shard, geometry, dtype, order)
    (data,) = made.parts(geometry.num_layers)
    return AdapterImage(made.layout, data)


def _check_range(
    pair: LoraPair, module: Module, layer: int, shard: Shard, dtype: torch.dtype, problems: Problems
) -> None:
    """Say which halves of a pair, as this rank holds them, `dtype` cannot hold. Bounds spare a look at the values: what
    is not beyond the limit is not when it has been rounded.
    """
    limit, scale = torch.finfo(dtype).max, float(np.float32(pair.scale))
    bound_a, bound_b = pair.checked_bounds()
    if not bound_a <= limit and not _is_finite(share_of_a(pair, shard.in_span(module)).to(dtype)):
        problems.group(f"lora_A {_beyond(dtype)}", f"layer {layer} {module}")
    if not bound_b * abs(scale) <= limit and not _is_finite(
        (share_of_b(pair, shard.out_span(module)).float() * scale).to(dtype)
    ):
        problems.group(f"lora_B times the scale {_beyond(dtype)}", f"layer {layer} {module}")


def _beyond(dtype: torch.dtype) -> str:
    return f"has values beyond {torch.finfo(dtype).max:g}, the largest of the pool's {dtype}"


def _is_finite(values: torch.Tensor) -> bool:
    return all(math.isfinite(value.item()) for value in torch.aminmax(values))
