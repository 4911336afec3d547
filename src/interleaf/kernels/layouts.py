"""Layouts of adapters, cut into pieces that lie on the device. Knows forms and layers; no adapter, no batch.

Many adapters share a layout, which is why pieces are cut for layouts and found through page lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from interleaf.core import LoraGroup, PooledLayout, StreamLayout, StreamOrder
from interleaf.kernels.forms import Form
from interleaf.kernels.records import RECORD_INTS, Ints, PoolTiles, cut_group
from interleaf.kernels.uploads import Uploads

Pair = tuple[Form, Form]
"""Forms of shrink and expand."""

Longs = npt.NDArray[np.int64]


class Field(IntEnum):
    """What is known of a group of a layout, cut for a pair of forms. All zero where the group is not targeted."""

    A_FIRST = 0  # pieces of the shrink: the first one's number, and how many
    A_NUMBER = 1
    B_FIRST = 2
    B_NUMBER = 3
    V_STRIDE = 4  # elements of a row of v
    SPLITS = 5
    HIGHEST = 6  # rank
    RAGGED_A = 7  # 1 where some piece is not plain
    RAGGED_B = 8
    A_ELEMS = 9
    B_ELEMS = 10
    IN = 11
    OUT = 12


class PieceArena:
    """Pieces on the device, one after another. Moves when it grows: no graph reads it."""

    def __init__(self, device: torch.device, uploads: Uploads, capacity: int = 4096) -> None:
        self._uploads = uploads
        self.data = torch.empty(capacity, RECORD_INTS, dtype=torch.int32, device=device)
        self.used = 0

    def put(self, pieces: Ints) -> int:
        """Copy them there, in the order of the current stream; returns the number of the first."""
        first, end = self.used, self.used + len(pieces)
        if end > len(self.data):
            larger = self.data.new_empty(max(end, 2 * len(self.data)), RECORD_INTS)
            larger[:first] = self.data[:first]
            self.data = larger
        self._uploads.send(pieces, self.data[first:end])
        self.used = end
        return first


class CutLayout:
    """A layout, cut for any pair of forms when that is first asked for.

    Attributes:
        highest: highest rank.
        users: adapters in the pool that have it.
    """

    __slots__ = ("_cuts", "highest", "layout", "users")

    def __init__(self, layout: PooledLayout) -> None:
        self.layout = layout
        self.highest = max((span.rank for stream in layout.layouts for span in stream.spans), default=0)
        self.users = 0
        self._cuts: dict[Pair, Longs] = {}

    def cut(self, pair: Pair, pool: PoolTiles, arena: PieceArena) -> Longs:
        """[streams, groups, fields]; one stream more than there are, of zeros, for layers without."""
        made = self._cuts.get(pair)
        if made is None:
            made = np.zeros((len(self.layout.layouts) + 1, len(LoraGroup), len(Field)), dtype=np.int64)
            for fields, stream in zip(made, self.layout.layouts, strict=False):
                _cut_stream(fields, stream, pair, pool, arena)
            self._cuts[pair] = made
        return made

    def forget(self) -> None:
        """The arena has been emptied."""
        self._cuts.clear()


def _cut_stream(fields: Longs, stream: StreamLayout, pair: Pair, pool: PoolTiles, arena: PieceArena) -> None:
    for of_group, group in zip(fields, LoraGroup, strict=True):
        spans = stream.group(group)
        if not spans:
            continue
        made = cut_group(pool, spans, *pair)
        of_group[Field.A_FIRST] = arena.put(np.concatenate([made.a, made.b]))
        of_group[Field.A_NUMBER] = len(made.a)
        of_group[Field.B_FIRST] = of_group[Field.A_FIRST] + len(made.a)
        of_group[Field.B_NUMBER] = len(made.b)
        of_group[Field.V_STRIDE] = made.v_stride
        of_group[Field.SPLITS] = made.splits
        of_group[Field.HIGHEST] = made.highest
        of_group[Field.RAGGED_A] = not made.plain_a
        of_group[Field.RAGGED_B] = not made.plain_b
        of_group[Field.A_ELEMS] = sum(s.a_elems for s in spans)
        of_group[Field.B_ELEMS] = sum(s.b_elems for s in spans)
        of_group[Field.IN] = made.in_features
        of_group[Field.OUT] = made.out_features


def pool_tiles(layout: PooledLayout, num_layers: int, lane_elems: int) -> PoolTiles:
    """The pool, counted in the layout's tiles.

    Raises: ValueError: the layout is of another pool, or its image is not cut in tiles, or a lane is not.
    """
    orders = {(s.order, s.tile) for s in layout.layouts} or {(StreamOrder.TILES, lane_elems)}
    order, tile = orders.pop()
    if orders or order is not StreamOrder.TILES:
        raise ValueError("the kernels of this device need images in StreamOrder.TILES, all of one tile")
    if lane_elems % tile:
        raise ValueError(f"a lane of {lane_elems} elements is not made of tiles of {tile}")
    if len(layout.layer_layout) != num_layers:
        raise ValueError(f"the layout describes {len(layout.layer_layout)} layers, the pool has {num_layers}")
    for stream in layout.layouts:
        if stream.elems > layout.pages * lane_elems:
            raise ValueError(
                f"a stream of {stream.elems} elements does not fit {layout.pages} lanes of {lane_elems} elements"
            )
    return PoolTiles(tile, lane_elems // tile, num_layers * (lane_elems // tile))


class LayoutSet:
    """The layouts that a batch may meet, and the classes of layers in which each of them is one and the same.

    Usually there is one class: all layers alike. A group of a class of layers is a *place*: places are numbered class
    after class, groups in the order of `LoraGroup`.

    Attributes:
        layer_class: the class of each layer.
        share: the part of all layers that a place's class has, [places].
        highest: highest rank of any layout.
    """

    def __init__(self, layouts: Sequence[CutLayout], pool: PoolTiles, arena: PieceArena, num_layers: int) -> None:
        self.layouts = layouts
        self._pool, self._arena = pool, arena
        signatures = list(zip(*(l.layout.layer_layout for l in layouts), strict=True)) or [()] * num_layers
        classes = {signature: i for i, signature in enumerate(dict.fromkeys(signatures))}
        self.layer_class = tuple(classes[s] for s in signatures)
        self._streams = [[s[i] for s in classes] for i in range(len(layouts))]  # of each layout in each class
        of_class = np.bincount(self.layer_class, minlength=len(classes)) / num_layers
        self.share: npt.NDArray[np.float64] = of_class.repeat(len(LoraGroup))
        self.highest = max((l.highest for l in layouts), default=0)
        self._fields: dict[Pair, Longs] = {}

    def fields(self, pair: Pair) -> Longs:
        """[layouts, places, fields]."""
        made = self._fields.get(pair)
        if made is None:
            cuts = [
                layout.cut(pair, self._pool, self._arena)[[-1 if s is None else s for s in streams]]
                for layout, streams in zip(self.layouts, self._streams, strict=True)
            ]
            made = self._fields[pair] = np.stack(cuts).reshape(len(cuts), -1, len(Field))
        return made
