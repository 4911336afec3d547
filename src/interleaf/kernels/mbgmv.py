"""LoRA for single tokens (MBGMV): products as sums of registers. Knows records only. Triton.

A program holds a piece of A or B in registers, all of it asked for at once and before it waits for the kernel before it
(programmatic dependent launch: weights depend on no kernel).

Source: S-LoRA (MLSys 2024) section 5.3; records in records.py; measurements in docs/benchmarks/h200/kernels.md.
"""

import triton
import triton.language as tl

from interleaf.kernels.paging import TABLES, WEIGHTS, load_piece, read_record, tile_elements


@triton.jit
def _shrink_piece(
    record,
    x,
    x_stride,
    pool,
    pages,
    rows,
    v,
    layer_tiles,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    base, more, cut, count, height, tiles, first, column, _ = read_record(record, TILE)
    v_at = tl.load(record + 5, eviction_policy=TABLES)
    token = tl.load(rows + first, eviction_policy=TABLES)

    r = tl.arange(0, HEIGHT)
    k = tl.arange(0, WIDTH)
    if PLAIN:
        inside = k < WIDTH
    else:
        inside = k // TILE < tiles
    a = load_piece(
        pool, pages, base, more, cut, height, tiles, layer_tiles,
        HEIGHT, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PLAIN,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_row = tl.load(x + token.to(tl.int64) * x_stride + column + k, mask=inside & (count > 0), other=0.0)
    low = tl.sum(a.to(tl.float32) * x_row.to(tl.float32)[None, :], 1)
    tl.store(v + v_at + r, low, mask=(r < height) & (count > 0))


@triton.jit(do_not_specialize=["layer_tiles"])
def shrink(
    records,
    x,
    x_stride,
    pool,
    pages,
    rows,
    v,
    layer_tiles,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """v[row, split, i] = sum over the split's columns k of A[i, k] * x[row, k], for the row and block of a record."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    record = records + tl.program_id(0) * 8
    plain = tl.load(record + 2, eviction_policy=TABLES) == 0
    tiles = tl.load(record + 3, eviction_policy=TABLES) >> 16
    # Low stacks have pieces twice as wide, so that a program never moves half of what it could.
    if tiles == 0:  # no rows
        if PDL:
            tl.extra.cuda.gdc_wait()
    elif tiles > WIDTH // TILE:
        if plain:
            _shrink_piece(
                record, x, x_stride, pool, pages, rows, v, layer_tiles,
                8, 2 * WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, True, PDL,
            )  # fmt: skip
        else:
            _shrink_piece(
                record, x, x_stride, pool, pages, rows, v, layer_tiles,
                8, 2 * WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, False, PDL,
            )  # fmt: skip
    elif plain:
        _shrink_piece(
            record, x, x_stride, pool, pages, rows, v, layer_tiles,
            16, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, True, PDL,
        )  # fmt: skip
    else:
        _shrink_piece(
            record, x, x_stride, pool, pages, rows, v, layer_tiles,
            16, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, False, PDL,
        )  # fmt: skip


@triton.jit
def _low_row(v_row, splits, stack, r, high, SPLITS: tl.constexpr):
    """The sum over the splits of entries r of one row of v.

    As one block, so that threads share the loads. When each loads all that it needs, splits are dear: 4 to 14 of them
    instead of 2 to 7 cost 15 us of 186 a layer (H200, 8B, r=16, 256 adapters); like this, none.
    """
    s = tl.arange(0, SPLITS)
    parts = tl.load(v_row + s[:, None] * stack + r[None, :], mask=(s < splits)[:, None] & high[None, :], other=0.0)
    return tl.sum(parts, 0)


@triton.jit
def _expand_piece(
    record,
    v,
    pool,
    pages,
    rows,
    y,
    y_stride,
    layer_tiles,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    base, more, cut, count, splits, tiles, first, column, heights = read_record(record, TILE)
    v_at = tl.load(record + 5, eviction_policy=TABLES)
    rank = heights & 0xFFFF
    stack = heights >> 16
    token = tl.load(rows + first, eviction_policy=TABLES)

    r = tl.arange(0, HEIGHT)
    n = tl.arange(0, WIDTH)
    if PLAIN:
        inside = n < WIDTH
        high = r < HEIGHT
        v_at = tl.multiple_of(v_at, 4)
        stack = tl.multiple_of(stack, 4)
    else:
        inside = n // TILE < tiles
        high = r < rank
    b = load_piece(
        pool, pages, base, more, cut, rank, tiles, layer_tiles,
        HEIGHT, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PLAIN,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    y_row = y + token.to(tl.int64) * y_stride + column + n
    before = tl.load(y_row, mask=inside & (count > 0), other=0.0)
    low = _low_row(v + v_at, splits, stack, r, high & (count > 0), SPLITS)
    update = tl.sum(low[:, None] * b.to(tl.float32), 0)
    tl.store(y_row, (before.to(tl.float32) + update).to(y.dtype.element_ty), mask=inside & (count > 0))


@triton.jit
def _expand_class(
    record,
    v,
    pool,
    pages,
    rows,
    y,
    y_stride,
    layer_tiles,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.load(record + 2, eviction_policy=TABLES) != 0:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, HEIGHT, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, False, PDL,
        )  # fmt: skip
    else:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, HEIGHT, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, True, PDL,
        )  # fmt: skip


@triton.jit
def _expand_deep(
    record,
    v,
    pool,
    pages,
    rows,
    y,
    y_stride,
    layer_tiles,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece of a B whose rank exceeds HEIGHT: rows of B in turn, pages looked up, for the piece may exceed a lane."""
    base, more, _, count, splits, tiles, first, column, heights = read_record(record, TILE)
    v_at = tl.load(record + 5, eviction_policy=TABLES)
    rank = heights & 0xFFFF
    stack = heights >> 16

    n = tl.arange(0, WIDTH)
    inside = n // TILE < tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.load(rows + first, eviction_policy=TABLES)
    update = tl.zeros((WIDTH,), tl.float32)
    for r_first in range(0, rank, HEIGHT):
        r = r_first + tl.arange(0, HEIGHT)
        t = (n // TILE)[None, :] * rank + r[:, None]
        mask = (r < rank)[:, None] & inside[None, :] & (count > 0)
        at = tile_elements(t, mask, base, more, 0, pages, layer_tiles, TILE, LANE_TILES, PAGE_TILES, True)
        b = tl.load(pool + at + (n % TILE)[None, :], mask=mask, other=0.0, eviction_policy=WEIGHTS)
        low = _low_row(v + v_at, splits, stack, r, (r < rank) & (count > 0), SPLITS)
        update += tl.sum(low[:, None] * b.to(tl.float32), 0)
    y_row = y + token.to(tl.int64) * y_stride + column + n
    before = tl.load(y_row, mask=inside & (count > 0), other=0.0)
    tl.store(y_row, (before.to(tl.float32) + update).to(y.dtype.element_ty), mask=inside & (count > 0))


@triton.jit(do_not_specialize=["layer_tiles"])
def expand(
    records,
    v,
    pool,
    pages,
    rows,
    y,
    y_stride,
    layer_tiles,
    SPLITS: tl.constexpr,
    HIGHEST: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row, column + n] += sum_r B[n, r] * (sum over splits of v[row, split, r]), for the row and piece of a record.

    HIGHEST: the highest class of rank among the records: 8, 16, 32, 64, or 128 for more.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    record = records + tl.program_id(0) * 8
    rank = tl.load(record + 7, eviction_policy=TABLES) & 0xFFFF
    # Each class of rank has its own shape, of about the same number of elements.
    if rank == 0:  # no rows
        if PDL:
            tl.extra.cuda.gdc_wait()
    elif rank <= 8:
        _expand_class(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, 8, 2 * WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    elif HIGHEST <= 16 or rank <= 16:
        _expand_class(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, 16, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    elif HIGHEST <= 32 or rank <= 32:
        _expand_class(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, 32, WIDTH // 2, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    elif HIGHEST <= 64 or rank <= 64:
        _expand_class(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, 64, WIDTH // 4, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    else:
        _expand_deep(
            record, v, pool, pages, rows, y, y_stride, layer_tiles,
            SPLITS, 64, WIDTH // 4, TILE, LANE_TILES, PAGE_TILES, PDL,
        )  # fmt: skip
