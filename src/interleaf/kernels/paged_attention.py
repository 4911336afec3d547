"""Attention straight from a paged pool: decode rows in parts, their merging, and rows of chunks. Triton.

The query heads that read one KV head are the rows of one matrix product, so K and V are loaded once for all of them.
Softmax is computed online, in powers of two. What lies in slots beyond `stop` is never loaded: under a mask of the
scores alone, NaN in V would still give NaN.

Records are eight int32 each, one or more per program, made by interleaf.attention.paged_plan.

Source: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023), PagedAttention (Kwon et al. 2023).
"""

import triton
import triton.language as tl

_NO_SCORE = tl.constexpr(float("-inf"))


@triton.jit
def _slot_elements(pages, position, inside, PAGE_TOKENS: tl.constexpr, PAGE_ELEMS: tl.constexpr, TOKEN: tl.constexpr):
    """Where K of each position begins, counted from the same layer and head of page 0. int64: pools exceed 2**31."""
    page = tl.load(pages + position // PAGE_TOKENS, mask=inside, other=0)
    return page.to(tl.int64) * PAGE_ELEMS + position % PAGE_TOKENS * TOKEN


@triton.jit(do_not_specialize=["layer"])
def decode(
    parts,
    q,
    table,
    table_stride,
    pool,
    layer,
    out,
    part_out,
    part_lse,
    log2_scale,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One decode row and KV head against positions [first, stop) of its sequence.

    parts: (row, seat, first, stop, place, 0, 0, 0). place 0: the row has one part, its result goes to `out`; otherwise
    to part `place - 1` of part_out [parts, heads, head_dim] and part_lse [parts, heads], float32. A record of zeroes
    means nothing.
    log2_scale: what scores are multiplied by, log2(e) included.
    """
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    part = parts + tl.program_id(1) * 8
    row = tl.load(part)
    seat = tl.load(part + 1)
    first = tl.load(part + 2)
    stop = tl.load(part + 3)
    place = tl.load(part + 4)
    pages = table + seat.to(tl.int64) * table_stride
    m = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_TOKENS)
    head = kv_head * GROUP + m
    is_q = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    of_head = head[:, None] * HEAD_DIM + d[None, :]
    keys = pool + layer.to(tl.int64) * (2 * PAGE_TOKENS * TOKEN) + kv_head * HEAD_DIM + d[None, :]
    if PDL:
        # Also where nothing is to be done: who waits for this kernel relies on the one before it having ended.
        tl.extra.cuda.gdc_wait()
    if first == stop:
        return
    q_rows = tl.load(q + row.to(tl.int64) * (HEADS * HEAD_DIM) + of_head, mask=is_q, other=0.0)
    highest = tl.full((BLOCK_GROUP,), _NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in tl.range(first, stop, BLOCK_TOKENS, num_stages=STAGES):
        position = start + n
        inside = position < stop
        at = _slot_elements(pages, position, inside, PAGE_TOKENS, PAGE_ELEMS, TOKEN)
        is_kv = inside[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + at[:, None], mask=is_kv, other=0.0)
        scores = tl.dot(q_rows, tl.trans(k), input_precision="ieee") * log2_scale
        scores = tl.where(inside[None, :], scores, _NO_SCORE)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = tl.load(keys + PAGE_TOKENS * TOKEN + at[:, None], mask=is_kv, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = higher
    acc = acc / total[:, None]
    if place == 0:
        tl.store(out + row.to(tl.int64) * (HEADS * HEAD_DIM) + of_head, acc.to(out.dtype.element_ty), mask=is_q)
    else:
        tl.store(part_out + (place - 1) * (HEADS * HEAD_DIM) + of_head, acc, mask=is_q)
        tl.store(part_lse + (place - 1) * HEADS + head, highest + tl.log2(total), mask=m < GROUP)


@triton.jit
def merge(
    merges,
    part_out,
    part_lse,
    out,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The results of a row's parts, weighted by the sums of their exponentials, in the order of the parts.

    merges: (row, first part, number of parts, 0, 0, 0, 0, 0). No parts: nothing.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    record = merges + tl.program_id(1) * 8
    row = tl.load(record)
    first = tl.load(record + 1)
    count = tl.load(record + 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count == 0:
        return
    s = tl.arange(0, BLOCK_PARTS)
    m = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + m
    of_head = head[:, None] * HEAD_DIM + d[None, :]
    is_out = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    highest = tl.full((BLOCK_GROUP,), _NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in tl.range(0, count, BLOCK_PARTS):
        inside = start + s < count
        part = first + start + s
        # Heads that only fill the block get zeros, so that no infinity is subtracted from another.
        lse = tl.load(
            part_lse + part[:, None] * HEADS + head[None, :], mask=inside[:, None] & (m < GROUP)[None, :], other=0.0
        )
        lse = tl.where(inside[:, None], lse, _NO_SCORE)
        higher = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - higher[None, :])
        fade = tl.exp2(highest - higher)
        place = part_out + part[:, None, None] * (HEADS * HEAD_DIM) + of_head[None, :, :]
        found = tl.load(place, mask=inside[:, None, None] & is_out[None, :, :], other=0.0)
        total = total * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(found * weights[:, :, None], 0)
        highest = higher
    acc = acc / total[:, None]
    tl.store(out + row.to(tl.int64) * (HEADS * HEAD_DIM) + of_head, acc.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["layer"])
def chunks(
    tiles,
    q,
    table,
    table_stride,
    pool,
    layer,
    out,
    log2_scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Neighbouring rows of one sequence, and one KV head, against their past and themselves.

    tiles: (first row, seat, rows, position of the first row, 0, 0, 0, 0); at most BLOCK_ROWS // GROUP rows.
    WINDOW: tokens that a row may look back at, itself included; 0 = all.
    """
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 8
    row = tl.load(tile)
    seat = tl.load(tile + 1)
    count = tl.load(tile + 2)
    first_query = tl.load(tile + 3)
    pages = table + seat.to(tl.int64) * table_stride
    m = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_TOKENS)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_q = (token < count)[:, None] & (d < HEAD_DIM)[None, :]
    of_rows = (row + token).to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    # Rows that only fill the block see what the last one sees.
    query = first_query + tl.minimum(token, count - 1)
    keys = pool + layer.to(tl.int64) * (2 * PAGE_TOKENS * TOKEN) + kv_head * HEAD_DIM + d[None, :]
    stop = first_query + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_query + 1 - WINDOW, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_rows = tl.load(q + of_rows, mask=is_q, other=0.0)
    highest = tl.full((BLOCK_ROWS,), _NO_SCORE, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for start in tl.range(first, stop, BLOCK_TOKENS, num_stages=STAGES):
        position = start + n
        inside = position < stop
        at = _slot_elements(pages, position, inside, PAGE_TOKENS, PAGE_ELEMS, TOKEN)
        is_kv = inside[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + at[:, None], mask=is_kv, other=0.0)
        scores = tl.dot(q_rows, tl.trans(k), input_precision="ieee") * log2_scale
        seen = position[None, :] <= query[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > query[:, None] - WINDOW)
        scores = tl.where(seen, scores, _NO_SCORE)
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row whose window begins in a later block has seen nothing yet.
        base = tl.where(higher == _NO_SCORE, 0.0, higher) if WINDOW > 0 else higher
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        v = tl.load(keys + PAGE_TOKENS * TOKEN + at[:, None], mask=is_kv, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = higher
    tl.store(out + of_rows, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_q)
