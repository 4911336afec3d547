"""LoRA in plain torch: what the op means, and the CPU path. Knows index tables; not how they were laid out or chosen.

The pool is read as rows of `unit` elements, a length that divides the lane, every width and every offset of the stream,
so that one table of row numbers describes a matrix wherever its pages lie; a layer is an offset of the view.

Few rows per adapter (decode) are bound by memory traffic and call overhead. `FusedRun` reads each weight from the pool
where it lies, with no copy, and takes all adapters of one shape in one call: B x as a weighted embedding bag, A x as
that operator's derivative by its weights, which is a gathered dot product. Many rows per adapter (prefill) are bound by
arithmetic: `DenseRun` copies one matrix at a time to a small scratch buffer and multiplies. docs/benchmarks/cpu-lora.md
holds the measurements, of what was tried and lost too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

FUSED_ROWS = 8
"""Rows of one adapter up to which FusedRun wins: it reads a weight once per row, DenseRun writes and reads a copy."""

_MAX_SLICES = 6
"""Adding to more separate ranges of rows than this costs more calls than one index_add_ costs time."""

_gathered_dots = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
"""(grad, weight, indices, _, bag of each index, mode, padding) -> out[i] = dot(grad[bag[i]], weight[indices[i]])."""
_SUM = 0
_NO_PADDING = -1


@dataclass(frozen=True, slots=True)
class PartShape:
    """The modules of one group that have the same rank in one adapter. Parts of equal shape run together.

    Attributes:
        unit: elements of a row of the pool's view.
        columns: (first column, width) of each module in the group's fused output, ascending.
    """

    unit: int
    rank: int
    in_features: int
    columns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Where the weights of a part lie: row numbers of the pool seen as [-1, unit], for layer 0.

    Attributes:
        a_rows: [modules * rank, in / unit], module after module.
        b_rows: [sum of widths / unit, rank]: for each unit of columns, its piece of every row of B^T.
    """

    shape: PartShape
    a_rows: Tensor
    b_rows: Tensor


class Run(Protocol):
    """Work for some rows and one group, good for every layer that shares a layout."""

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        """Do it for the layer whose lane in page 0 starts at element `first`."""


def _view(pool: Tensor, unit: int, num_rows: int, first: int) -> Tensor:
    return pool.as_strided((num_rows, unit), (unit, 1), pool.storage_offset() + first)


class Rows:
    """Some rows of the batch, ascending; consecutive ones are taken as slices, which cost nothing.

    Attributes:
        numbers: the rows.
        index: the same as a tensor.
        slices: (rows of the batch, the same rows counted within this set) of each run of consecutive rows.
    """

    __slots__ = ("index", "numbers", "slices")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = sorted(numbers)
        self.index = torch.tensor(self.numbers)
        self.slices: list[tuple[slice, slice]] = []
        for _, pairs in groupby(enumerate(self.numbers), key=lambda pair: pair[1] - pair[0]):
            run = list(pairs)
            (place, row), (last_place, last_row) = run[0], run[-1]
            self.slices.append((slice(row, last_row + 1), slice(place, last_place + 1)))

    @property
    def range(self) -> slice | None:
        """The rows as one slice, if they are consecutive."""
        return self.slices[0][0] if len(self.slices) == 1 else None


def _merged(columns: Sequence[tuple[int, int]]) -> list[slice]:
    """Adjacent columns as one slice."""
    out: list[slice] = []
    for first, width in columns:
        if out and out[-1].stop == first:
            out[-1] = slice(out[-1].start, first + width)
        else:
            out.append(slice(first, first + width))
    return out


class _RowAdder:
    """Adds a [rows, columns] update to scattered rows and columns of y, in as few calls as their runs allow."""

    __slots__ = ("_columns", "_rows", "_slices")

    def __init__(self, rows: Rows, columns: Sequence[tuple[int, int]]) -> None:
        self._rows = rows.index
        self._slices = rows.slices if len(rows.slices) <= _MAX_SLICES else None
        self._columns = []
        start = 0
        for c in _merged(columns):
            self._columns.append((c, slice(start, start + c.stop - c.start)))
            start += c.stop - c.start

    def add(self, y: Tensor, update: Tensor) -> None:
        for to, source in self._columns:
            if self._slices is None:
                y[:, to].index_add_(0, self._rows, update[:, source])
            else:
                for rows, part in self._slices:
                    y[rows, to].add_(update[part, source])


class FusedRun:
    """A few rows each of several adapters whose parts have one shape. Copies no weights.

    Bags are ordered by adapter, columns, row: a piece of B is fetched from memory once and used by all rows of its
    adapter while it is in the nearest cache. A last gather puts the update in the order of the batch.
    """

    __slots__ = (
        "_a_rows",
        "_adder",
        "_b_rows",
        "_bags",
        "_dims",
        "_order",
        "_unit",
        "_view_rows",
        "_weights",
        "_x_rows",
    )

    def __init__(self, parts: Sequence[Part], rows: Sequence[Rows]) -> None:
        """`rows[i]` are the batch rows of `parts[i]`."""
        shape = parts[0].shape
        unit, rank = shape.unit, shape.rank
        counts = [len(r.numbers) for r in rows]
        num_rows = sum(counts)
        pieces = shape.in_features // unit
        width = sum(w for _, w in shape.columns)
        num_bags = width // unit  # of one row
        ranks = len(shape.columns) * rank

        a_rows = torch.stack([p.a_rows for p in parts])
        b_rows = torch.stack([p.b_rows for p in parts])
        n = torch.tensor(counts)
        owner = torch.arange(len(parts)).repeat_interleave(n)
        first = (n.cumsum(0) - n)[owner]
        index = torch.arange(num_rows)
        batch_row = torch.cat([r.index for r in rows])

        self._unit = unit
        self._dims = (num_rows, ranks, pieces, width)
        self._view_rows = 1 + max(int(a_rows.max()), int(b_rows.max()))
        self._a_rows = a_rows[owner].view(-1)
        self._x_rows = (
            (batch_row.view(-1, 1, 1) * pieces + torch.arange(pieces)).expand(-1, ranks, -1).reshape(-1).contiguous()
        )

        # Where the bag of (row, columns) stands, and the other way round.
        place = (first * num_bags + index - first).view(-1, 1) + n[owner].view(-1, 1) * torch.arange(num_bags)
        bag = torch.empty(num_rows * num_bags, dtype=torch.int64)
        bag[place.view(-1)] = torch.arange(num_rows * num_bags)
        row, column = bag // num_bags, bag % num_bags
        module = torch.cat([torch.full((w // unit,), m) for m, (_, w) in enumerate(shape.columns)])
        self._b_rows = b_rows[owner[row], column].view(-1)
        self._weights = ((row * ranks + module[column] * rank).view(-1, 1) + torch.arange(rank)).view(-1)
        self._bags = torch.arange(0, num_rows * num_bags * rank, rank)
        ascending = batch_row.argsort()
        self._order = place[ascending].view(-1)
        self._adder = _RowAdder(Rows(batch_row.tolist()), shape.columns)

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        num_rows, ranks, pieces, width = self._dims
        weights = _view(pool, self._unit, self._view_rows, first)
        dots = _gathered_dots(
            x.view(-1, self._unit), weights, self._a_rows, self._bags, self._x_rows, _SUM, _NO_PADDING
        )
        low = dots.view(num_rows * ranks, pieces).sum(1) if pieces > 1 else dots
        update = torch.embedding_bag(
            weights, self._b_rows, self._bags, False, _SUM, False, low.index_select(0, self._weights)
        )[0]
        self._adder.add(y, update.index_select(0, self._order).view(num_rows, width))


class Scratch:
    """A buffer for weights, reused by every run of a step; allocated when first used.

    Args:
        elems: elements of the largest module of any adapter that runs dense, A and B together.
    """

    __slots__ = ("_gathered", "_wide", "elems")

    def __init__(self, elems: int) -> None:
        self.elems = elems
        self._gathered: Tensor | None = None
        self._wide: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._gathered, self._wide) if t is not None)

    def gather(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Rows of the pool's view side by side, flat, at least in float32; valid until the next call.

        16-bit products are slow on most CPUs (docs/benchmarks/cpu-lora.md), so 16-bit weights are widened.
        """
        if self._gathered is None or self._gathered.dtype != weights.dtype:
            self._gathered = torch.empty(self.elems, dtype=weights.dtype)
        count = rows.numel() * weights.shape[1]
        flat = self._gathered[:count]
        torch.index_select(weights, 0, rows, out=flat.view(-1, weights.shape[1]))
        if weights.dtype.itemsize >= 4:
            return flat
        if self._wide is None:
            self._wide = torch.empty(self.elems)
        return self._wide[:count].copy_(flat)


class DenseRun:
    """Many rows of one adapter: each matrix is copied to the scratch buffer, then multiplied."""

    __slots__ = ("_a", "_adders", "_b", "_range", "_rows", "_scratch", "_shape", "_view_rows")

    def __init__(self, part: Part, rows: Rows, scratch: Scratch) -> None:
        shape = part.shape
        self._shape = shape
        self._rows = rows.index
        self._range = rows.range
        self._view_rows = 1 + max(int(part.a_rows.max()), int(part.b_rows.max()))
        self._scratch = scratch
        modules, pieces = len(shape.columns), shape.in_features // shape.unit
        # All A in one product when they fit the buffer that the largest module needs anyway.
        at_once = modules if modules * shape.rank * shape.in_features <= scratch.elems else 1
        self._a = [a.reshape(-1) for a in torch.split(part.a_rows.view(modules, -1, pieces), at_once)]
        widths = [w // shape.unit for _, w in shape.columns]
        self._b = [b.t().reshape(-1) for b in torch.split(part.b_rows, widths)]
        self._adders = [_RowAdder(rows, [c]) for c in shape.columns]

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        shape, scratch = self._shape, self._scratch
        weights = _view(pool, shape.unit, self._view_rows, first)
        mine = x[self._range] if self._range is not None else x.index_select(0, self._rows)
        mine = mine if x.dtype.itemsize >= 4 else mine.float()
        lows = [mine @ scratch.gather(weights, a).view(-1, shape.in_features).t() for a in self._a]
        lows = [low for block in lows for low in torch.split(block, shape.rank, 1)]
        for low, b, (start, width), adder in zip(lows, self._b, shape.columns, self._adders, strict=True):
            b_t = scratch.gather(weights, b).view(shape.rank, width)
            if self._range is not None and b_t.dtype == y.dtype:
                y[self._range, start : start + width].addmm_(low, b_t)
            else:
                adder.add(y, (low @ b_t).to(y.dtype))
