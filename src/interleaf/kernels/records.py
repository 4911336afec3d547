"""What each program of the paged LoRA kernels does, as records of 32 bytes. Knows streams; no page, no batch.

A record names a piece of one matrix (a run of tiles in the pool, resolved to where layer 0 has them: a layer is an
offset) and a few rows of the batch. Ints of a record:

       0     1     2    3                                4           5              6             7
shrink base  more  cut  rows | height << 8 | tiles << 16  first row   v, elements    x, tiles      distance of v's rows
expand base  more  cut  rows | splits << 8 | tiles << 16  first row   v, elements    y, tiles      rank | stack << 16

Tile t of a piece is tile `(base if t < cut else more) + t` of the pool. A `cut` of 0 marks a plain piece: all in one
page and exactly of its kernel's shape, so that nothing needs a mask. Where it is negative, tile t is tile `base + t` of
the adapter's stream, whose page number is to be looked up in the page lists from entry `more` on. `first row` points
into the step's row table. A row of v, the product A x, is [splits, stack]: each split of the columns of x leaves a sum
of its own, and the expand adds them in their order, so that the same work always gives the same bits. A record of zeros
does nothing.

Here pieces are cut from a layout, once for all adapters that have it. They lack pages and rows: int 0 is the first tile
in the stream, int 1 whether the piece goes on in the next page, v counts from the adapter's first row. The resolve
kernel (resolve.py) makes records of them.

Source: S-LoRA (MLSys 2024) section 5.3; docs/adr/0010-image-order-per-device.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interleaf.core import STACK_ROWS, ModuleSpan
from interleaf.kernels.forms import Form

RECORD_INTS = 8
_LOOKED_UP = -1
_PLAIN = 0

Ints = npt.NDArray[np.int32]

RANK_CLASSES = (8, 16, 32, 64, 128)
"""128 is any rank above 64."""


def rank_class(rank: int, vector: bool) -> int:
    """The class of rank whose shape a program of the expand has: the rank, rounded up."""
    return next((c for c in RANK_CLASSES[:-1] if rank <= c and (vector or c > 8)), RANK_CLASSES[-1])


@dataclass(frozen=True, slots=True)
class PoolTiles:
    """The pool, counted in tiles.

    Attributes:
        tile: elements of a tile.
        lane_tiles, page_tiles: tiles of a lane and of a page.
    """

    tile: int
    lane_tiles: int
    page_tiles: int


@dataclass(frozen=True, slots=True)
class GroupPieces:
    """One group of one layout, cut for one pair of forms.

    Attributes:
        a, b: pieces of the shrink and of the expand, [N, 8].
        splits: of the columns of x.
        v_stride: elements of a row of v.
        highest: highest rank.
        plain_a, plain_b: whether all of them are plain.
        out_features: columns of the group's output up to the last one that is written.
    """

    a: Ints
    b: Ints
    splits: int
    v_stride: int
    highest: int
    plain_a: bool
    plain_b: bool
    in_features: int
    out_features: int


def cut_group(pool: PoolTiles, spans: Sequence[ModuleSpan], shrink: Form, expand: Form) -> GroupPieces:
    """The pieces of a group of at least one module."""
    a, splits = _cut_a(pool, spans, shrink)
    b = _cut_b(pool, spans, expand, splits)
    return GroupPieces(
        a=a,
        b=b,
        splits=splits,
        v_stride=splits * sum(s.rank for s in spans),
        highest=max(s.rank for s in spans),
        plain_a=not a[:, 2].any(),
        plain_b=not b[:, 2].any(),
        in_features=spans[0].in_features,
        out_features=max(s.out_first + s.out_features for s in spans),
    )


def _cut_a(pool: PoolTiles, spans: Sequence[ModuleSpan], form: Form) -> tuple[Ints, int]:
    """A stack of all A: split after split of its columns, each in blocks of STACK_ROWS rows."""
    stack, tiles = sum(s.rank for s in spans), spans[0].in_features // pool.tile
    step = form.columns // pool.tile
    low = form.vector and stack <= STACK_ROWS // 2
    splits = -(-tiles // (step * (2 if low else 1)))
    each = -(-tiles // splits)
    splits = -(-tiles // each)

    blocks = np.arange(0, stack, STACK_ROWS)
    split, row = (i.ravel() for i in np.meshgrid(np.arange(splits), blocks, indexing="ij"))
    height = np.minimum(STACK_ROWS, stack - row)
    count = np.minimum(each, tiles - split * each)
    first = (spans[0].a_first + row * spans[0].in_features) // pool.tile + split * each * height
    whole = (height == (STACK_ROWS // 2 if each > step else STACK_ROWS)) & (count % (form.step // pool.tile) == 0)
    if form.vector:  # It takes a piece in one step, which for a low stack is twice as wide.
        whole &= count * height == step * STACK_ROWS
    looked_up = np.broadcast_to(form.looks_up(pool.tile, pool.lane_tiles), whole.shape)
    where = _place(pool, first, count * height, whole, looked_up)
    return _pieces(where, height << 8 | count << 16, split * stack + row, split * each, splits * stack), splits


def _cut_b(pool: PoolTiles, spans: Sequence[ModuleSpan], form: Form, splits: int) -> Ints:
    """Each B by its columns, all rows at once."""
    stack = sum(s.rank for s in spans)
    aligned = all(s.rank % 4 == 0 for s in spans)  # a plain piece loads four elements of v at a time
    looks_up = form.looks_up(pool.tile, pool.lane_tiles)
    made = []
    above = 0
    for span in spans:
        height = rank_class(span.rank, form.vector)
        most = form.columns * STACK_ROWS // min(height, 64) // pool.tile
        at = np.arange(0, span.out_features // pool.tile, most)
        count = np.minimum(most, span.out_features // pool.tile - at)
        whole = (count == most) & (aligned and span.rank == height)
        looked_up = np.broadcast_to(looks_up or height > 64, at.shape)
        where = _place(pool, span.b_first // pool.tile + at * span.rank, count * span.rank, whole, looked_up)
        column = span.out_first // pool.tile + at
        made.append(_pieces(where, splits << 8 | count << 16, above, column, span.rank | stack << 16))
        above += span.rank
    return np.concatenate(made)


def _place(
    pool: PoolTiles,
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    whole: npt.NDArray[np.bool_],
    looked_up: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int64], ...]:
    """(first, goes on, cut) of `count` tiles from tile `first` of the stream on; `whole`: of just a kernel's shape."""
    left = pool.lane_tiles - first % pool.lane_tiles
    goes_on = (left < count) & ~looked_up
    cut = np.where(goes_on, left, np.where(whole, _PLAIN, count))
    return first, goes_on.astype(np.int64), np.where(looked_up, _LOOKED_UP, cut)


def _pieces(
    where: tuple[npt.NDArray[np.int64], ...],
    packed: npt.NDArray[np.int64],
    v_at: npt.NDArray[np.int64] | int,
    column: npt.NDArray[np.int64],
    last: int,
) -> Ints:
    made = np.empty((len(packed), RECORD_INTS), dtype=np.int32)
    for i, values in enumerate((*where, packed, 0, v_at, column, last)):
        made[:, i] = values
    return made
