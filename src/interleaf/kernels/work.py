"""Which rows of a step need which adapter, resolved for the CPU. Knows pages and layouts; computes nothing.

A `PooledAdapter` is made once, when an adapter becomes resident; a `LoraWork` once per composition of the batch, and
every layer uses it: a layer is an offset. A caller whose batch has not changed since the last step may keep the work.
On a GPU, `device_lora.DeviceLora` makes the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from interleaf.core import LoraGroup, ModuleSpan, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels.reference import FUSED_ROWS, DenseRun, FusedRun, Part, PartShape, Rows, Run, Scratch


class PooledAdapter:
    """An adapter in a CPU's pool, ready to be put to work.

    Args:
        pages: the adapter's pages, in the order of its stream.
        num_layers, lane_elems, device: of the pool.

    Attributes:
        parts: index tables for each layout and group.

    Raises: ValueError: pages or layers contradict the layout, or pool or image are another device's.
    """

    __slots__ = (
        "lane_elems",
        "largest_module_elems",
        "last_page",
        "layer_layout",
        "num_layers",
        "parts",
    )

    def __init__(
        self,
        layout: PooledLayout,
        pages: Sequence[int],
        *,
        num_layers: int,
        lane_elems: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"device must be cpu, got {device}: the adapters of a GPU's pool are DeviceLora's")
        if len(pages) != layout.pages or len(set(pages)) != len(pages) or min(pages, default=0) < 0:
            raise ValueError(f"pages must be {layout.pages} different page ids, got {list(pages)}")
        if len(layout.layer_layout) != num_layers:
            raise ValueError(f"the layout describes {len(layout.layer_layout)} layers, the pool has {num_layers}")
        for stream in layout.layouts:
            if stream.elems > len(pages) * lane_elems:
                raise ValueError(
                    f"a stream of {stream.elems} elements does not fit {len(pages)} lanes of {lane_elems} elements"
                )
        self.num_layers = num_layers
        self.lane_elems = lane_elems
        self.last_page = max(pages, default=0)
        self.layer_layout = layout.layer_layout
        self.largest_module_elems = max((m.a_elems + m.b_elems for s in layout.layouts for m in s.spans), default=0)
        if any(stream.order is not StreamOrder.ROWS for stream in layout.layouts):
            raise ValueError("the kernels of the CPU need images in StreamOrder.ROWS")
        table = torch.tensor(pages, dtype=torch.int64)
        self.parts: tuple[Mapping[LoraGroup, tuple[Part, ...]], ...] = tuple(
            {g: _parts(stream, g, table, num_layers, lane_elems) for g in LoraGroup} for stream in layout.layouts
        )


def _parts(stream: StreamLayout, group: LoraGroup, pages: Tensor, num_layers: int, lane_elems: int) -> tuple[Part, ...]:
    """The parts of one group: its modules by rank, in order of first appearance."""
    by_rank: dict[int, list[ModuleSpan]] = defaultdict(list)
    for span in stream.group(group):
        by_rank[span.rank].append(span)
    return tuple(_part(spans, pages, num_layers, lane_elems) for spans in by_rank.values())


def _part(spans: Sequence[ModuleSpan], pages: Tensor, num_layers: int, lane_elems: int) -> Part:
    unit = lane_elems
    for s in spans:
        unit = gcd(unit, s.in_features, s.out_features, s.a_first, s.b_first)
    lane = lane_elems // unit

    def rows(first: int, elems: int) -> Tensor:
        stream = torch.arange(first // unit, (first + elems) // unit)
        return pages[stream // lane] * (num_layers * lane) + stream % lane

    shape = PartShape(unit, spans[0].rank, spans[0].in_features, tuple((s.out_first, s.out_features) for s in spans))
    a_rows = torch.cat([rows(s.a_first, s.a_elems) for s in spans]).view(-1, shape.in_features // unit)
    b_rows = torch.cat([rows(s.b_first, s.b_elems).view(s.rank, -1).t() for s in spans])
    return Part(shape, a_rows, b_rows)


@dataclass(frozen=True, slots=True)
class GroupRuns:
    """Everything to do for one group in the layers that share a layout.

    Attributes:
        in_features: width of the group's input.
        out_features: columns of the group's output up to the last one that is written.
    """

    runs: tuple[Run, ...]
    in_features: int
    out_features: int

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        for run in self.runs:
            run.add(x, y, pool, first)


@dataclass(frozen=True, slots=True)
class LoraWork:
    """What the rows of one step need from adapters.

    Attributes:
        num_rows: one past the last row of the last segment.
        layers: for each layer, the groups that some row's adapter targets there.
        last_page: highest page id that is read.
        scratch: the buffer for weights; empty until used.
    """

    num_rows: int
    num_layers: int
    lane_elems: int
    last_page: int
    device: torch.device
    layers: tuple[Mapping[LoraGroup, GroupRuns], ...]
    scratch: Scratch


def build_work(segments: Iterable[tuple[PooledAdapter | None, int, int]]) -> LoraWork | None:
    """Sort the rows of a step by adapter and choose how each group of rows is computed.

    Args:
        segments: (adapter or None for the base model, first row, number of rows), in the order of the batch. An
            adapter may have several; rows between segments are base rows.

    Returns: None if no row has an adapter: then no LoRA op is called.
    Raises: ValueError: segments overlap or go backwards, or their adapters are of different pools.
    """
    numbers: dict[PooledAdapter, list[int]] = {}
    end = 0
    for adapter, first, count in segments:
        if first < end or count < 0:
            raise ValueError(f"segments must ascend without overlap: {count} rows at {first} after row {end}")
        end = first + count
        if adapter is not None and count:
            numbers.setdefault(adapter, []).extend(range(first, end))
    if not numbers:
        return None
    adapters = list(numbers)
    rows = [Rows(n) for n in numbers.values()]
    pools = {(a.num_layers, a.lane_elems) for a in adapters}
    if len(pools) > 1:
        raise ValueError(f"adapters must share one pool, got (layers, elements of a lane) {sorted(pools)}")
    num_layers, lane_elems = pools.pop()
    last_page = max(a.last_page for a in adapters)
    scratch = Scratch(max((a.largest_module_elems for a in adapters if len(numbers[a]) > FUSED_ROWS), default=0))
    made: dict[tuple[int | None, ...], Mapping[LoraGroup, GroupRuns]] = {}
    layers = []
    for signature in zip(*(a.layer_layout for a in adapters), strict=True):
        if signature not in made:
            made[signature] = _layer(adapters, rows, signature, scratch)
        layers.append(made[signature])
    return LoraWork(end, num_layers, lane_elems, last_page, torch.device("cpu"), tuple(layers), scratch)


def _layer(
    adapters: Sequence[PooledAdapter], rows: Sequence[Rows], signature: Sequence[int | None], scratch: Scratch
) -> Mapping[LoraGroup, GroupRuns]:
    """The runs of a layer in which adapter i has layout `signature[i]`."""
    groups = {}
    for group in LoraGroup:
        runs: list[Run] = []
        fused: dict[PartShape, tuple[list[Part], list[Rows]]] = {}
        shapes = []
        for adapter, its_rows, index in zip(adapters, rows, signature, strict=True):
            for part in () if index is None else adapter.parts[index][group]:
                shapes.append(part.shape)
                if len(its_rows.numbers) > FUSED_ROWS:
                    runs.append(DenseRun(part, its_rows, scratch))
                else:
                    of_shape = fused.setdefault(part.shape, ([], []))
                    of_shape[0].append(part)
                    of_shape[1].append(its_rows)
        runs.extend(FusedRun(parts, their_rows) for parts, their_rows in fused.values())
        if runs:
            last = max(first + width for shape in shapes for first, width in shape.columns)
            groups[group] = GroupRuns(tuple(runs), shapes[0].in_features, last)
    return groups
