"""Every conversion between tokens, pages, lanes, tiles and bytes. No torch, no device.

The pool is `[pages, layers, 2, page_tokens, kv_heads, head_dim]`. One layer of one page is a *lane*: to attention it
holds `page_tokens` slots of K, then of V; to LoRA it is a flat run of `lane_elems` elements. An adapter's layer l is
one stream of elements that runs through lane l of the adapter's pages, in order.

Source: S-LoRA (MLSys 2024) section 4.1, generalised; docs/adr/0002-page-geometry.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

MAX_TILE = 128
MIN_TILE = 16


def largest_power_of_two_divisor(n: int, limit: int) -> int:
    """The largest power of two that divides n and is at most `limit` (itself a power of two)."""
    return gcd(n, limit)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """The shape of one rank's pages.

    Attributes:
        page_tokens: tokens of KV in a page.
        num_kv_heads: KV heads held by this rank.
        itemsize_bytes: bytes of one element.
    """

    page_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize_bytes: int

    @property
    def lane_elems(self) -> int:
        """Elements of one layer of one page."""
        return 2 * self.page_tokens * self.num_kv_heads * self.head_dim

    @property
    def page_elems(self) -> int:
        return self.num_layers * self.lane_elems

    @property
    def page_bytes(self) -> int:
        return self.page_elems * self.itemsize_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, over all layers."""
        return self.page_bytes // self.page_tokens

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that hold the KV of that many tokens of one sequence."""
        return -(-num_tokens // self.page_tokens)

    def pages_for_stream(self, elems: int) -> int:
        """Pages that an adapter takes whose longest layer stream has that many elements."""
        return -(-elems // self.lane_elems)

    def pages_for_bytes(self, num_bytes: int) -> int:
        """Whole pages that fit in a budget."""
        return num_bytes // self.page_bytes

    def tile(self, widths: Iterable[int]) -> int:
        """Elements of a tile: the largest power of two <= 128 that divides the lane and every width.

        A stream made of rows of those widths can be cut in tiles that never cross a lane.
        """
        n = self.lane_elems
        for width in widths:
            n = gcd(n, width)
        return largest_power_of_two_divisor(n, MAX_TILE)

    def block_elems(self, tile: int) -> int:
        """Elements of a kernel's block of rows: the largest power of two <= 16, times `tile`, that divides the lane."""
        return tile * largest_power_of_two_divisor(self.lane_elems // tile, 16)
