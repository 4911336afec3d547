"""LoRA for runs of rows of an adapter (MBGMM): products as matrix products. Knows records only. Triton.

A program takes up to TOKENS rows of one adapter, gathered through the step's row table, and one piece of A or B.

Source: S-LoRA (MLSys 2024) section 5.3; records in records.py; measurements in docs/benchmarks/h200/kernels.md.
"""

import triton
import triton.language as tl

from interleaf.kernels.paging import TABLES, WEIGHTS, load_piece, read_record, tile_elements


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
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """v[row, split, i] = sum over the split's columns k of A[i, k] * x[row, k], for the rows and block of a record.

    PLAIN: all records are. (Two loops in one kernel would take twice the shared memory.)
    Without rows there are no tiles either: nothing is read but the record.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    record = records + tl.program_id(0) * 8
    base, more, cut, count, height, tiles, first, column, v_stride = read_record(record, TILE)
    v_at = tl.load(record + 5, eviction_policy=TABLES)

    m = tl.arange(0, TOKENS)
    r = tl.arange(0, 16)
    k = tl.arange(0, WIDTH)
    token = tl.load(rows + first + m, mask=m < count, other=0, eviction_policy=TABLES)
    x_rows = x + (token.to(tl.int64) * x_stride + column)[:, None] + k[None, :]
    low = tl.zeros((TOKENS, 16), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PLAIN:
        at = (base.to(tl.int64) + layer_tiles) * TILE
        a_block = pool + at + r[:, None] * TILE + (k // TILE * (16 * TILE) + k % TILE)[None, :]
        for tile in tl.range(0, tiles, WIDTH // TILE, num_stages=STAGES):
            a = tl.load(a_block + tile * (16 * TILE), eviction_policy=WEIGHTS)
            x_part = tl.load(x_rows + tile * TILE, mask=(m < count)[:, None], other=0.0)
            low = tl.dot(x_part, tl.trans(a), low, input_precision="ieee")
    else:
        for tile in tl.range(0, tiles, WIDTH // TILE, num_stages=STAGES):
            inside = tile + k // TILE < tiles
            t = (tile + k // TILE)[None, :] * height + r[:, None]
            mask = (r < height)[:, None] & inside[None, :]
            at = tile_elements(t, mask, base, more, cut, pages, layer_tiles, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP)
            a = tl.load(pool + at + (k % TILE)[None, :], mask=mask, other=0.0, eviction_policy=WEIGHTS)
            x_part = tl.load(x_rows + tile * TILE, mask=(m < count)[:, None] & inside[None, :], other=0.0)
            low = tl.dot(x_part, tl.trans(a), low, input_precision="ieee")
    v_rows = v + v_at + m[:, None] * v_stride + r[None, :]
    tl.store(v_rows, low, mask=(m < count)[:, None] & (r < height)[None, :])


@triton.jit
def _low_rows(v, v_at, splits, stack, m, count, r, rank, SPLITS: tl.constexpr):
    """The sum over the splits of entries r of rows m of v."""
    s = tl.arange(0, SPLITS)
    places = (m * splits * stack)[None, :, None] + (s * stack)[:, None, None] + r[None, None, :]
    mask = (s < splits)[:, None, None] & (m < count)[None, :, None] & (r < rank)[None, None, :]
    return tl.sum(tl.load(v + v_at + places, mask=mask, other=0.0), 0)


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
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEEP: tl.constexpr,
    PLAIN: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """DEEP: the rank exceeds HEIGHT; rows of B in turn, pages looked up, for the piece may exceed a lane."""
    base, more, cut, count, splits, tiles, first, column, heights = read_record(record, TILE)
    v_at = tl.load(record + 5, eviction_policy=TABLES)
    rank = heights & 0xFFFF
    stack = heights >> 16

    m = tl.arange(0, STEP)
    r = tl.arange(0, HEIGHT)
    n = tl.arange(0, WIDTH)
    y_columns = y + column + n
    if PLAIN:
        inside = n < WIDTH
        v_at = tl.multiple_of(v_at, 4)
        stack = tl.multiple_of(stack, 4)
    else:
        inside = n // TILE < tiles
    if DEEP:
        t = (n // TILE)[None, :] * rank + r[:, None]
        token = tl.load(rows + first + m, mask=m < count, other=0, eviction_policy=TABLES)
        if PDL:
            tl.extra.cuda.gdc_wait()
        for at in range(0, count, STEP):
            token = tl.load(rows + first + at + m, mask=at + m < count, other=0, eviction_policy=TABLES)
            update = tl.zeros((STEP, WIDTH), tl.float32)
            for r_first in range(0, rank, HEIGHT):
                mask = (r_first + r < rank)[:, None] & inside[None, :]
                place = tile_elements(
                    t + r_first, mask, base, more, 0, pages, layer_tiles, TILE, LANE_TILES, PAGE_TILES, True
                )
                b = tl.load(pool + place + (n % TILE)[None, :], mask=mask, other=0.0, eviction_policy=WEIGHTS)
                low = _low_rows(v, v_at, splits, stack, at + m, count, r_first + r, rank, SPLITS)
                update = tl.dot(low.to(b.dtype), b, update, input_precision="ieee")
            y_rows, mask = _rows_of(y_columns, y_stride, token), (at + m < count)[:, None] & inside[None, :]
            _store_sum(y_rows, mask, tl.load(y_rows, mask=mask, other=0.0), update)
    else:
        b = load_piece(
            pool, pages, base, more, cut, rank, tiles, layer_tiles,
            HEIGHT, WIDTH, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PLAIN,
        )  # fmt: skip
        if TOKENS == STEP:
            token = tl.load(rows + first + m, mask=m < count, other=0, eviction_policy=TABLES)
            if PDL:
                tl.extra.cuda.gdc_wait()
            y_rows, mask = _rows_of(y_columns, y_stride, token), (m < count)[:, None] & inside[None, :]
            before = tl.load(y_rows, mask=mask, other=0.0)  # under way beside v, not behind the product
            low = _low_rows(v, v_at, splits, stack, m, count, r, rank, SPLITS)
            _store_sum(y_rows, mask, before, tl.dot(low.to(b.dtype), b, input_precision="ieee"))
        else:
            if PDL:
                tl.extra.cuda.gdc_wait()
            for at in tl.range(0, count, STEP, num_stages=STAGES):
                token = tl.load(rows + first + at + m, mask=at + m < count, other=0, eviction_policy=TABLES)
                low = _low_rows(v, v_at, splits, stack, at + m, count, r, rank, SPLITS)
                update = tl.dot(low.to(b.dtype), b, input_precision="ieee")
                y_rows, mask = _rows_of(y_columns, y_stride, token), (at + m < count)[:, None] & inside[None, :]
                _store_sum(y_rows, mask, tl.load(y_rows, mask=mask, other=0.0), update)


@triton.jit
def _rows_of(y_columns, y_stride, token):
    return y_columns[None, :] + (token.to(tl.int64) * y_stride)[:, None]


@triton.jit
def _store_sum(y_rows, mask, before, update):
    """The update is rounded before it is added: what changes hands between threads is then half as long."""
    after = before.to(tl.float32) + update.to(before.dtype).to(tl.float32)
    tl.store(y_rows, after.to(before.dtype), mask=mask)


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
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    HIGHEST: tl.constexpr,
    WIDTH: tl.constexpr,
    PLAIN: tl.constexpr,
    TILE: tl.constexpr,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    LOOKED_UP: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[row, column + n] += sum_r B[n, r] * (sum over splits of v[row, split, r]), for the rows and piece of a record.

    In a 16-bit dtype the sum over splits is rounded to it before it meets B.
    STEP: rows at a time. PLAIN: all records are.
    HIGHEST: the highest class of rank among the records: 16, 32, 64, or 128 for more.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    record = records + tl.program_id(0) * 8
    rank = tl.load(record + 7, eviction_policy=TABLES) & 0xFFFF
    # Each class of rank has its own shape, of about the same number of elements.
    if rank == 0:  # no rows
        if PDL:
            tl.extra.cuda.gdc_wait()
    elif HIGHEST <= 16 or rank <= 16:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles, SPLITS, TOKENS, STEP, STAGES,
            16, WIDTH, False, PLAIN, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    elif HIGHEST <= 32 or rank <= 32:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles, SPLITS, TOKENS, STEP, STAGES,
            32, WIDTH // 2, False, PLAIN, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    elif HIGHEST <= 64 or rank <= 64:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles, SPLITS, TOKENS, STEP, STAGES,
            64, WIDTH // 4, False, PLAIN, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
    else:
        _expand_piece(
            record, v, pool, pages, rows, y, y_stride, layer_tiles, SPLITS, TOKENS, STEP, STAGES,
            64, WIDTH // 4, True, False, TILE, LANE_TILES, PAGE_TILES, LOOKED_UP, PDL,
        )  # fmt: skip
