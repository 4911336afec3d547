"""The adapters in the pool, as a step's rows refer to them. Knows uids, page lists and layouts; no form, no launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import overload

import numpy as np
import torch

from interleaf.core import PooledLayout
from interleaf.kernels.adapter_pages import AdapterPages
from interleaf.kernels.layouts import CutLayout, LayoutSet, Longs, PieceArena, pool_tiles
from interleaf.kernels.records import PoolTiles
from interleaf.kernels.tasks import Members
from interleaf.kernels.uploads import Uploads

Segment = tuple[Hashable | None, int, int]
"""(uid of an adapter or None for the base model, first row, number of rows)."""


class SingleRows(Sequence[Segment]):
    """Segments of one row each, from row 0 on without gaps: a step of decode rows. Made and compared in less time.

    Args:
        uids: of the adapter of each row.
    """

    __slots__ = ("uids",)

    def __init__(self, uids: tuple[Hashable | None, ...]) -> None:
        self.uids = uids

    def __len__(self) -> int:
        return len(self.uids)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.uids[index], range(len(self.uids))[index], 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleRows) and self.uids == other.uids


_BASE, _UNKNOWN = -1, -2
_MOST_PIECES = 1 << 20
"""Pieces on the device (32 MB) beyond which layouts are cut anew as they are needed."""
_PAGE_ENTRIES = 1 << 20


class Residents:
    """Adapters by number; a number is free again when its adapter is removed.

    Attributes:
        last_page: highest page id that any adapter ever had.
        pieces: of the layouts.
    """

    def __init__(self, num_layers: int, lane_elems: int, device: torch.device) -> None:
        self._num_layers, self._lane_elems, self._device = num_layers, lane_elems, device
        self._pool: PoolTiles | None = None
        self._number: dict[Hashable | None, int] = {None: _BASE}
        self._free: list[int] = []
        self._held: list[tuple[CutLayout, tuple[int, ...]] | None] = []  # layout and pages of each number
        self._page_firsts: Longs = np.zeros(0, dtype=np.int64)
        self._layout_of: Longs = np.zeros(0, dtype=np.int64)  # valid while there is a layout set
        self._layouts: dict[PooledLayout, CutLayout] = {}
        self._set: LayoutSet | None = None
        self._uploads = Uploads(device)
        self._lists = AdapterPages(_PAGE_ENTRIES, device, self._uploads)
        self.pieces = PieceArena(device, self._uploads)
        self.last_page = 0

    @property
    def pages(self) -> torch.Tensor:
        """Page lists on the device."""
        return self._lists.data

    @property
    def has_layouts(self) -> bool:
        """Whether there has been an adapter."""
        return bool(self._layouts)

    @property
    def pool(self) -> PoolTiles:
        """Known once there has been an adapter."""
        assert self._pool is not None, "no adapter has been added"
        return self._pool

    def add(self, uid: Hashable, layout: PooledLayout, pages: Sequence[int]) -> bool:
        """Take an adapter in. Returns whether the page lists have moved.

        Raises: ValueError: it is there already, or layout and pages contradict each other or the pool.
        """
        if uid in self._number:
            raise ValueError(f"adapter {uid} is in the pool already")
        self._check(layout, pages)
        cut = self._layouts.get(layout)
        if cut is None:
            cut = self._take_layout(layout)
        if not cut.users:
            self._set = None
        cut.users += 1
        number = self._free.pop() if self._free else len(self._held)
        if number == len(self._held):
            self._held.append(None)
            if number == len(self._page_firsts):
                grown = max(64, 2 * number)
                self._page_firsts, self._layout_of = (np.resize(a, grown) for a in (self._page_firsts, self._layout_of))
        self._held[number] = (cut, tuple(pages))
        self._number[uid] = number
        if self._set is not None:
            self._layout_of[number] = self._set.layouts.index(cut)
        self.last_page = max((self.last_page, *pages))
        first = self._lists.put(pages)
        if first is None:
            self._move_lists()
            return True
        self._page_firsts[number] = first
        return False

    def remove(self, uid: Hashable) -> None:
        """Raises: ValueError: it is not there."""
        number = self._number.pop(uid, _UNKNOWN) if uid is not None else _UNKNOWN
        if number == _UNKNOWN:
            raise ValueError(f"adapter {uid} is not in the pool")
        held = self._held[number]
        assert held is not None
        cut, pages = held
        cut.users -= 1
        if not cut.users:
            self._set = None
        self._lists.take_back(int(self._page_firsts[number]), len(pages))
        self._held[number] = None
        self._free.append(number)

    def layouts(self) -> LayoutSet:
        """The layouts in the pool: the same object until one comes or goes. If there is none, those that there were.

        No others: what launches there are, and how fast, hangs on the highest rank, and on all that layouts share.
        """
        if self._set is None:
            cuts = [cut for cut in self._layouts.values() if cut.users] or list(self._layouts.values())
            self._set = LayoutSet(cuts, self.pool, self.pieces, self._num_layers)
            numbers = {id(cut): i for i, cut in enumerate(cuts)}
            for number, held in enumerate(self._held):
                if held is not None:
                    self._layout_of[number] = numbers[id(held[0])]
        return self._set

    def members(self, segments: Sequence[Segment]) -> tuple[Members | None, int]:
        """A step's rows by adapter, and one past the last row of the last segment. None if no row has an adapter.

        Raises: ValueError: segments overlap or go backwards, or an adapter is not in the pool.
        """
        if not segments:
            return None, 0
        found, numbers, end = self._single(segments) if isinstance(segments, SingleRows) else self._rows(segments)
        if not found.size:
            return None, end
        order = numbers.argsort(kind="stable")
        rows, numbers = found[order].astype(np.int32), numbers[order]
        begins = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
        adapters = numbers[begins]
        self.layouts()
        return Members(
            rows=rows,
            layouts=self._layout_of[adapters],
            page_firsts=self._page_firsts[adapters],
            counts=np.concatenate([begins[1:], [len(numbers)]]) - begins,
            firsts=begins,
        ), end

    def _single(self, segments: SingleRows) -> tuple[Longs, Longs, int]:
        """Rows that have an adapter, its number for each, and one past the last row of all."""
        numbers = self._numbers(segments.uids)
        rows = np.flatnonzero(numbers != _BASE)
        return rows, numbers[rows], len(numbers)

    def _rows(self, segments: Sequence[Segment]) -> tuple[Longs, Longs, int]:
        """As `_single`, of any segments."""
        uids, firsts_of, counts_of = zip(*segments, strict=True)
        firsts, counts = np.array(firsts_of, dtype=np.int64), np.array(counts_of, dtype=np.int64)
        ends = firsts + counts
        if (wrong := np.flatnonzero((firsts < np.concatenate([[0], ends[:-1]])) | (counts < 0))).size:
            i = int(wrong[0])
            before = int(ends[i - 1]) if i else 0
            raise ValueError(
                f"segments must ascend without overlap: {counts[i]} rows at {firsts[i]} after row {before}"
            )
        numbers = self._numbers(uids)
        some = np.flatnonzero((numbers != _BASE) & (counts > 0))
        numbers, firsts, counts = numbers[some], firsts[some], counts[some]
        if (counts > 1).any():
            within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
            firsts, numbers = firsts.repeat(counts) + within, numbers.repeat(counts)
        return firsts, numbers, int(ends[-1])

    def _numbers(self, uids: tuple[Hashable | None, ...]) -> Longs:
        numbers = np.fromiter(map(self._number.get, uids, repeat(_UNKNOWN)), dtype=np.int64, count=len(uids))
        if numbers.min() == _UNKNOWN:
            raise ValueError(f"adapter {uids[int(numbers.argmin())]} is not in the pool")
        return numbers

    def _check(self, layout: PooledLayout, pages: Sequence[int]) -> None:
        if not layout.layouts:
            raise ValueError("the adapter targets no module of any layer")
        if len(pages) != layout.pages or len(set(pages)) != len(pages) or min(pages, default=0) < 0:
            raise ValueError(f"pages must be {layout.pages} different page ids, got {list(pages)}")
        if layout in self._layouts:
            pool = self.pool
        else:
            pool = pool_tiles(layout, self._num_layers, self._lane_elems)
        if self._pool is None:
            self._pool = pool
        if pool != self._pool:
            raise ValueError(f"a tile must have {self._pool.tile} elements, as all in this pool, got {pool.tile}")
        if (max(pages, default=0) + 1) * pool.page_tiles > np.iinfo(np.int32).max:
            raise ValueError(f"page {max(pages)} of {pool.page_tiles} tiles a page lies beyond 2^31 tiles")

    def _take_layout(self, layout: PooledLayout) -> CutLayout:
        """Take a layout in, and forget those that no adapter has any more."""
        self._layouts = {l: cut for l, cut in self._layouts.items() if cut.users}
        cut = self._layouts[layout] = CutLayout(layout)
        if self.pieces.used > _MOST_PIECES:
            self.pieces = PieceArena(self._device, self._uploads)
            for other in self._layouts.values():
                other.forget()
        self._set = None
        return cut

    def _move_lists(self) -> None:
        """To memory of twice the size."""
        self._lists = AdapterPages(2 * len(self._lists.data), self._device, self._uploads)
        for number, held in enumerate(self._held):
            if held is not None:
                first = self._lists.put(held[1])
                assert first is not None
                self._page_firsts[number] = first
