"""How a program finds its weights in the pool: the one piece of address arithmetic that all LoRA kernels share. Triton.

A piece is a run of tiles of an adapter's stream (`StreamOrder.TILES`), shorter than a lane, so that it meets at most
one change of page. Its record says where both ends lie; nothing is looked up. Where lanes are too short for that (small
pages), or a matrix too high, records name the piece's place in the stream instead, and each tile's page is looked up.
"""

import triton
import triton.language as tl


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
