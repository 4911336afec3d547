"""Which pages hold a sequence's KV, and how many tokens it has there. Numpy only: no torch, no device.

Tables change when something starts, grows or leaves; a steady decode step reads them and moves lengths on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_FIRST_WIDTH = 8
"""Pages per seat for which there is room at first; doubled when a sequence needs more, so there is no cap."""


class PageTable:
    """Page tables of all seats.

    Attributes:
        page_tokens: tokens in a page.
        pages: [seats, width]; a seat's first `num_pages` entries are its pages in order, the others mean nothing.
        num_pages: [seats].
        lengths: [seats], tokens whose KV has been written.
    """

    def __init__(self, num_seats: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages: Ints = np.zeros((num_seats, _FIRST_WIDTH), dtype=np.int64)
        self.num_pages: Ints = np.zeros(num_seats, dtype=np.int64)
        self.lengths: Ints = np.zeros(num_seats, dtype=np.int64)

    def start(self, seat: int, pages: Sequence[int]) -> None:
        """A sequence without KV takes a free seat."""
        assert self.num_pages[seat] == 0, f"seat {seat} is taken"
        self.lengths[seat] = 0
        self.grow(seat, pages)

    def grow(self, seat: int, pages: Sequence[int]) -> None:
        """These pages continue a seat's table."""
        first = int(self.num_pages[seat])
        stop = first + len(pages)
        width = self.pages.shape[1]
        if stop > width:
            wider = np.zeros((self.pages.shape[0], max(stop, 2 * width)), dtype=np.int64)
            wider[:, :width] = self.pages
            self.pages = wider
        self.pages[seat, first:stop] = pages
        self.num_pages[seat] = stop

    def vacate(self, seat: int) -> None:
        """A seat's pages are somebody else's from now on. A free seat may be vacated."""
        self.num_pages[seat] = 0
        self.lengths[seat] = 0

    def slots(self, seats: Ints, positions: Ints, rows_per_page: int) -> Ints:
        """The row that holds each position, where page p begins at row `p * rows_per_page`.

        Args: seats, positions: [N].
        """
        column = positions // self.page_tokens
        assert (column < self.num_pages[seats]).all(), "a position lies beyond its sequence's pages"
        return self.pages[seats, column] * rows_per_page + positions % self.page_tokens

    def advance(self, seats: Ints, counts: Ints | int) -> None:
        """So many more tokens of each seat have been written. A seat occurs once at most."""
        self.lengths[seats] += counts
