"""How a program finds its work and its weights: records, and pieces of matrices in the pool's pages. Triton.

A piece is a run of tiles of an adapter's stream (`StreamOrder.TILES`), shorter than a lane, so that it meets at most
one change of page. Its record says where both ends lie; nothing is looked up. Where lanes are too short for that (small
pages), or a matrix too high, records name the piece's place in the stream instead, and each tile's page is looked up.
"""

import triton
import triton.language as tl

TABLES = tl.constexpr("evict_last")
"""Hint to the L2 cache for what every layer reads: records and the row table."""
WEIGHTS = tl.constexpr("evict_first")
"""And for what a step reads once: so it is rather x, v and y that the next kernel finds there."""


@triton.jit
def read_record(record, TILE: tl.constexpr):
    """(base, more, cut, rows, middle, tiles, first row, column in elements, last) of records.py.

    The place in v is left to callers: what they know of its alignment must be said of the load itself, or is lost when
    this is inlined.
    """
    base = tl.load(record, eviction_policy=TABLES)
    more = tl.load(record + 1, eviction_policy=TABLES)
    cut = tl.load(record + 2, eviction_policy=TABLES)
    packed = tl.load(record + 3, eviction_policy=TABLES)
    first = tl.load(record + 4, eviction_policy=TABLES)
    column = tl.load(record + 6, eviction_policy=TABLES) * TILE
    last = tl.load(record + 7, eviction_policy=TABLES)
    return base, more, cut, packed & 0xFF, (packed >> 8) & 0xFF, packed >> 16, first, column, last


@triton.jit
def tile_elements(
    t,
    mask,
    base,
    more,
    cut,
    pages,
    layer_tiles,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
):
    """Where the t-th tile of a piece begins: elements from the start of the pool, int64, in the shape of t."""
    if LOOKED_UP:
        at = base + t
        page = tl.load(pages + more + at // LANE_TILES, mask=mask, other=0)
        tile = page.to(tl.int64) * PAGE_TILES + at % LANE_TILES
    else:
        tile = tl.where(t < cut, base, more).to(tl.int64) + t
    return (tile + layer_tiles) * TILE


@triton.jit
def load_piece(
    pool,
    pages,
    base,
    more,
    cut,
    height,
    tiles,
    layer_tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """A piece at once, [HEIGHT, WIDTH]: `height` rows by `tiles` tiles, else zeros. PLAIN: all, in one page."""
    r = tl.arange(0, HEIGHT)
    k = tl.arange(0, WIDTH)
    if PLAIN:
        at = (base.to(tl.int64) + layer_tiles) * TILE
        place = r[:, None] * TILE + (k // TILE * (HEIGHT * TILE) + k % TILE)[None, :]
        return tl.load(pool + at + place, eviction_policy=WEIGHTS)
    else:
        t = (k // TILE)[None, :] * height + r[:, None]
        mask = (r < height)[:, None] & (k // TILE < tiles)[None, :]
        at = tile_elements(t, mask, base, more, cut, pages, layer_tiles, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP)
        return tl.load(pool + at + (k % TILE)[None, :], mask=mask, other=0.0, eviction_policy=WEIGHTS)
