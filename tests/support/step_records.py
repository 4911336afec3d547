"""A step's records of the paged LoRA kernels, built one adapter after another on the host: an oracle for the resolve
kernel. It cuts every piece by itself, from an adapter's pages. The meaning of a record is in kernels/records.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from interleaf.core import STACK_ROWS, LoraGroup, ModuleSpan, PooledLayout, StreamOrder
from interleaf.kernels.forms import Form, choose_forms

RECORD_INTS = 8
_LOOKED_UP = -1
_PLAIN = 0

Ints = npt.NDArray[np.int32]


def rank_class(rank: int, vector: bool) -> int:
    """The class of rank whose shape a program of the expand has: the rank, rounded up; 128 is any above 64."""
    return next((c for c in (8, 16, 32, 64) if rank <= c and (vector or c > 8)), 128)


@dataclass(frozen=True, slots=True)
class GroupPieces:
    """Records of one group of one adapter that lack their rows. Places in v are those of the adapter's first row.

    Attributes:
        a, b: of the shrink and of the expand, [N, 8].
        splits: of the columns of x.
        v_stride: elements of a row of v.
        highest: highest rank.
        out_features: columns of the group's output up to the last one that is written.
    """

    a: Ints
    b: Ints
    splits: int
    v_stride: int
    highest: int
    in_features: int
    out_features: int


class AdapterRecords:
    """An adapter in the pool, as pieces.

    Args:
        pages: the adapter's pages, in the order of its stream.
        num_layers, lane_elems: of the pool.

    Raises: ValueError: the image is not cut in tiles, or there are more tiles in the pool than an int32 can number.
    """

    __slots__ = ("_layouts", "_made", "highest", "lane_tiles", "page_tiles", "pages", "tile")

    def __init__(self, layout: PooledLayout, pages: Sequence[int], *, num_layers: int, lane_elems: int) -> None:
        orders = {(s.order, s.tile) for s in layout.layouts} or {(StreamOrder.TILES, lane_elems)}
        order, self.tile = orders.pop()
        if orders or order is not StreamOrder.TILES:
            raise ValueError("the kernels of this device need images in StreamOrder.TILES, all of one tile")
        if lane_elems % self.tile:
            raise ValueError(f"a lane of {lane_elems} elements is not made of tiles of {self.tile}")
        self.lane_tiles = lane_elems // self.tile
        self.page_tiles = num_layers * self.lane_tiles
        if (max(pages, default=0) + 1) * self.page_tiles > np.iinfo(np.int32).max:
            raise ValueError(f"page {max(pages)} of {self.page_tiles} tiles a page lies beyond 2^31 tiles")
        self.pages: Ints = np.asarray(pages, dtype=np.int32)
        self.highest = max((span.rank for stream in layout.layouts for span in stream.spans), default=0)
        self._layouts = layout.layouts
        self._made: dict[tuple[int, Form, Form], tuple[GroupPieces | None, ...]] = {}

    def pieces(self, layout: int, forms: tuple[Form, Form]) -> tuple[GroupPieces | None, ...]:
        """The pieces of each group in the layers of that layout; None where the adapter targets no module of it."""
        key = (layout, *forms)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = tuple(self._cut(self._layouts[layout].group(g), *forms) for g in LoraGroup)
        return made

    def _cut(self, spans: tuple[ModuleSpan, ...], shrink: Form, expand: Form) -> GroupPieces | None:
        if not spans:
            return None
        a, splits = self._cut_a(shrink, spans)
        return GroupPieces(
            a=a,
            b=self._cut_b(expand, splits, spans),
            splits=splits,
            v_stride=splits * sum(s.rank for s in spans),
            highest=max(s.rank for s in spans),
            in_features=spans[0].in_features,
            out_features=max(s.out_first + s.out_features for s in spans),
        )

    def _cut_a(self, form: Form, spans: tuple[ModuleSpan, ...]) -> tuple[Ints, int]:
        tile, looked_up = self.tile, form.looks_up(self.tile, self.lane_tiles)
        stack, width = sum(s.rank for s in spans), spans[0].in_features
        tiles = width // tile
        low = form.vector and stack <= STACK_ROWS // 2
        splits = -(-tiles // (form.columns // tile * (2 if low else 1)))
        each = -(-tiles // splits)
        splits = -(-tiles // each)
        full_height = STACK_ROWS // 2 if each > form.columns // tile else STACK_ROWS
        records = []
        for split in range(splits):
            for row in range(0, stack, STACK_ROWS):
                height = min(STACK_ROWS, stack - row)
                count = min(each, tiles - split * each)
                first = (spans[0].a_first + row * width) // tile + split * each * height
                whole = height == full_height and count % (form.step // tile) == 0
                # The vector form takes a piece in one step, which for a low stack is twice as wide.
                whole = whole and (not form.vector or count * height == form.columns // tile * STACK_ROWS)
                where = self._place(first, count * height, looked_up, whole)
                v_at = split * stack + row
                records.append((*where, height << 8 | count << 16, 0, v_at, split * each, splits * stack))
        return np.array(records, dtype=np.int32), splits

    def _cut_b(self, form: Form, splits: int, spans: tuple[ModuleSpan, ...]) -> Ints:
        tile, looked_up = self.tile, form.looks_up(self.tile, self.lane_tiles)
        stack = sum(s.rank for s in spans)
        aligned = all(s.rank % 4 == 0 for s in spans)  # a plain piece loads four elements of v at a time
        records = []
        above = 0
        for span in spans:
            height = rank_class(span.rank, form.vector)
            most = form.columns * STACK_ROWS // min(height, 64) // tile
            for at in range(0, span.out_features // tile, most):
                count = min(most, span.out_features // tile - at)
                first = span.b_first // tile + at * span.rank
                whole = aligned and span.rank == height and count == most
                where = self._place(first, count * span.rank, looked_up or height > 64, whole)
                packed, column = splits << 8 | count << 16, span.out_first // tile + at
                records.append((*where, packed, 0, above, column, span.rank | stack << 16))
            above += span.rank
        return np.array(records, dtype=np.int32)

    def _place(self, first: int, count: int, looked_up: bool, whole: bool) -> tuple[int, int, int]:
        """(base, more, cut) of `count` tiles from tile `first` of the stream on; `whole`: of just a kernel's shape."""
        if looked_up:
            return first, 0, _LOOKED_UP
        lane, at = divmod(first, self.lane_tiles)
        base = int(self.pages[lane]) * self.page_tiles + at
        cut = self.lane_tiles - at
        if cut >= count:
            return base, base, _PLAIN if whole else count
        return base, int(self.pages[lane + 1]) * self.page_tiles - cut, cut


@dataclass(frozen=True, slots=True)
class Launch:
    """A shrink, or an expand, of some adapters' rows for one group, good for every layer of a signature.

    Attributes:
        splits, highest: the most, and the highest rank, of any record.
        plain: whether all records are.
    """

    form: Form
    expand: bool
    records: Ints
    splits: int
    highest: int
    plain: bool


@dataclass(frozen=True, slots=True)
class GroupLaunches:
    """All launches of one group, in their order.

    Attributes:
        v_elems: elements of v.
    """

    launches: tuple[Launch, ...]
    v_elems: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of rows that programs of one form take: for each its adapter, first row, rows, and rows before it."""

    adapters: Ints
    firsts: Ints
    counts: Ints
    earlier: Ints


class StepRows:
    """Who computes which rows of a step, cut into runs.

    Attributes:
        rows: the batch's rows, adapter after adapter: what a record's first row points into.
        pages: all adapters' page tables.
    """

    def __init__(self, adapters: Sequence[AdapterRecords], rows: Sequence[Sequence[int]], highest: int) -> None:
        """`rows[i]` are the batch's rows of `adapters[i]`; `highest`: the highest rank of any adapter in the pool."""
        self._adapters = adapters
        self.rows: Ints = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
        self.pages: Ints = np.concatenate([a.pages for a in adapters])
        self._page_firsts = np.array([0, *accumulate(len(a.pages) for a in adapters)], dtype=np.int32)
        counts = [len(r) for r in rows]
        self._counts = np.array(counts, dtype=np.int64)
        self._forms = choose_forms(counts, highest)
        self._shrinks = self._cut([shrink for shrink, _ in self._forms])
        self._expands = self._cut([expand for _, expand in self._forms])

    def _cut(self, forms: list[Form]) -> dict[Form, _Runs]:
        runs = {}
        firsts = self._counts.cumsum() - self._counts
        for form in dict.fromkeys(forms):
            mine = np.array([i for i, of in enumerate(forms) if of is form])
            each = -(-self._counts[mine] // form.tokens)
            adapters = mine.repeat(each)
            earlier = (np.arange(len(adapters)) - (each.cumsum() - each).repeat(each)) * form.tokens
            counts = np.minimum(self._counts[adapters] - earlier, form.tokens)
            ints = [a.astype(np.int32) for a in (adapters, firsts[adapters] + earlier, counts, earlier)]
            runs[form] = _Runs(*ints)
        return runs

    def groups(self, signature: Sequence[int | None]) -> dict[LoraGroup, GroupLaunches]:
        """What to launch for each group in a layer in which adapter i has layout `signature[i]`."""
        nothing = (None,) * len(LoraGroup)
        of_adapter = [
            nothing if layout is None else adapter.pieces(layout, forms)
            for adapter, forms, layout in zip(self._adapters, self._forms, signature, strict=True)
        ]
        made = {}
        for group, pieces in zip(LoraGroup, zip(*of_adapter, strict=True), strict=True):
            launches = self._group(pieces)
            if launches is not None:
                made[group] = launches
        return made

    def _group(self, pieces: Sequence[GroupPieces | None]) -> GroupLaunches | None:
        some = [p for p in pieces if p is not None]
        if not some:
            return None
        # A row of v for each row of each adapter; adapters begin where four elements can be loaded at a time.
        strides = np.array([0 if p is None else p.v_stride for p in pieces], dtype=np.int64)
        v_ends = (-(-strides * self._counts // 4) * 4).cumsum()
        v_firsts = np.concatenate([[0], v_ends[:-1]])
        launches = (
            *self._launches(
                self._shrinks, [None if p is None else p.a for p in pieces], some, v_firsts, strides, expand=False
            ),
            *self._launches(
                self._expands, [None if p is None else p.b for p in pieces], some, v_firsts, strides, expand=True
            ),
        )
        return GroupLaunches(launches, int(v_ends[-1]), some[0].in_features, max(p.out_features for p in some))

    def _launches(
        self,
        runs_of: dict[Form, _Runs],
        records_of: list[Ints | None],
        some: list[GroupPieces],
        v_firsts: npt.NDArray[np.int64],
        strides: npt.NDArray[np.int64],
        *,
        expand: bool,
    ) -> Iterator[Launch]:
        splits, highest = max(p.splits for p in some), max(p.highest for p in some)
        for form, runs in runs_of.items():
            chosen = [r for i in runs.adapters.tolist() if (r := records_of[i]) is not None]
            if not chosen:
                continue
            has = np.array([r is not None for r in records_of])[runs.adapters]
            adapters = runs.adapters[has]
            of = np.arange(len(chosen)).repeat([len(r) for r in chosen])
            records = np.concatenate(chosen)
            looked_up = records[:, 2] == _LOOKED_UP
            if looked_up.any():
                records[:, 1] += np.where(looked_up, self._page_firsts[adapters][of], 0)
            records[:, 3] |= runs.counts[has][of]
            records[:, 4] = runs.firsts[has][of]
            records[:, 5] += (v_firsts[adapters] + runs.earlier[has] * strides[adapters]).astype(np.int32)[of]
            yield Launch(form, expand, records, splits, highest, plain=not records[:, 2].any())
