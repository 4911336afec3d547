"""Rotation of q and k and the writing of k and v to their slots, as one launch for a step's rows. Triton.

A program takes one row and BLOCK_HEADS of its heads, q's, k's and v's alike.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer"])
def rotate_append(
    qkv,
    cos,
    sin,
    slots,
    pool,
    layer,
    q,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_ELEMS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """See interleaf.kernels.kv.rotate_and_append."""
    HALF: tl.constexpr = HEAD_DIM // 2
    LANE_HALF: tl.constexpr = PAGE_TOKENS * KV_HEADS * HEAD_DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    inside = (i < HALF)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row)
    x = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + i[None, :]
    is_head = (head < HEADS + 2 * KV_HEADS)[:, None]
    low = tl.load(x, mask=is_head & inside, other=0.0)
    high = tl.load(x + HALF, mask=is_head & inside, other=0.0)
    c = tl.load(cos + row * HEAD_DIM + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]

    # The first product is rounded to the dtype before the second is added: that is how `rotate` computes.
    low_c = (low.to(tl.float32) * c).to(low.dtype).to(tl.float32)
    high_c = (high.to(tl.float32) * c).to(low.dtype).to(tl.float32)
    turned_low = (low_c - high.to(tl.float32) * s).to(low.dtype)
    turned_high = (high_c + low.to(tl.float32) * s).to(low.dtype)
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    low = tl.where(is_v, low, turned_low)
    high = tl.where(is_v, high, turned_high)

    is_q = (head < HEADS)[:, None]
    to_q = q + row * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + i[None, :]
    tl.store(to_q, low, mask=is_q & inside)
    tl.store(to_q + HALF, high, mask=is_q & inside)
    kv = head - HEADS
    place = tl.where(kv < KV_HEADS, kv * HEAD_DIM, LANE_HALF + (kv - KV_HEADS) * HEAD_DIM)
    lane = slot // PAGE_TOKENS * PAGE_ELEMS + layer.to(tl.int64) * (2 * LANE_HALF)
    to_pool = pool + lane + slot % PAGE_TOKENS * (KV_HEADS * HEAD_DIM) + place[:, None] + i[None, :]
    tl.store(to_pool, low, mask=is_head & ~is_q & inside)
    tl.store(to_pool + HALF, high, mask=is_head & ~is_q & inside)
