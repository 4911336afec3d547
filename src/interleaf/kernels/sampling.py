"""The most probable token of each row, and a draw from the whole vocabulary. Triton; knows rows of logits and seats.

A row is cut in blocks of columns, and its blocks are shared out over as many programs as fill the device:

    best_parts     the largest logit of each part of a row                      read once: all that greedy rows cost
    weigh          the weight of each block; for filtered rows, how many         rows that are drawn, read a second time
                   logits lie how far below the largest
    gather         the largest logits of filtered rows, a few thousand (kernels/filtering.py)
    choose         the token

Weights are sampling_math's: whole numbers, exact in any order, so a token does not depend on how a row was shared out.
NaN counts as minus infinity, and equal logits are ranked by their ids.
"""

import triton
import triton.language as tl

from interleaf.kernels.filtering import (
    filtered_token,
    is_filtered,
    key_of,
    load_logits,
    real,
    uniform_of,
    value_of,
    weights,
)

_BINS = tl.constexpr(64)


@triton.jit
def _is_finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def _best_of_row(best, row, splits, SPLITS: tl.constexpr):
    """(largest logit, its lowest id) of a row."""
    part = tl.arange(0, SPLITS)
    packed = tl.max(tl.load(best + row * splits + part, mask=part < splits, other=-(2**63)), 0)
    return value_of((packed >> 32).to(tl.int32)), 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def _bin(gap):
    """How far below the largest, in eighths of powers of two from a quarter to 64: finer where it is nearer."""
    place = (gap.to(tl.int32, bitcast=True) >> 20) - (127 - 2) * 8
    return tl.minimum(tl.maximum(place, 0), _BINS - 1)


@triton.jit(do_not_specialize=["splits", "split_blocks"])
def best_parts(logits, stride, best, splits, split_blocks, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """best[row, split] = the largest logit of the part and its lowest id, packed so that the best is the largest."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    first = split * split_blocks
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + first
    for block in range(first, tl.minimum(first + split_blocks, tl.cdiv(VOCAB, BLOCK))):
        columns = block * BLOCK + lane
        values = tl.load(logits + row * stride + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
        larger = values > top
        top = tl.where(larger, values, top)
        at = tl.where(larger, block, at)
    packed = (key_of(top).to(tl.int64) << 32) | (0x7FFFFFFF - (at * BLOCK + lane)).to(tl.int64)
    tl.store(best + row * splits + split, tl.max(packed, 0))


@triton.jit(do_not_specialize=["splits", "split_blocks"])
def weigh(
    logits,
    stride,
    seats,
    state,
    best,
    sums,
    bins,
    splits,
    split_blocks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """sums[row, block] = weight of the block; bins[row, split, bin] = logits of the part in each bin.

    Rows that are greedy, or have no finite maximum, are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seat = tl.load(seats + row)
    temperature = real(state, seat, 3)
    top, _ = _best_of_row(best, row, splits, SPLITS)
    if (temperature > 0.0) & _is_finite(top):
        num_blocks = tl.cdiv(VOCAB, BLOCK)
        first = split * split_blocks
        counts = tl.zeros([_BINS], tl.int32)
        for block in range(first, tl.minimum(first + split_blocks, num_blocks)):
            values = load_logits(logits + row * stride, block * BLOCK + tl.arange(0, BLOCK), VOCAB)
            tl.store(sums + row * num_blocks + block, tl.sum(weights(values, top, temperature), 0))
            if FILTERED:
                counts += tl.histogram(_bin(top - values), _BINS)
        if FILTERED:
            tl.store(bins + (row * splits + split) * _BINS + tl.arange(0, _BINS), counts)


@triton.jit(do_not_specialize=["splits", "split_blocks"])
def gather(
    logits,
    stride,
    seats,
    state,
    best,
    bins,
    near,
    near_ids,
    num_near,
    splits,
    split_blocks,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Write a filtered row's largest logits, at most NEAR and whole bins of them, and their ids, by id."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seat = tl.load(seats + row)
    top, _ = _best_of_row(best, row, splits, SPLITS)
    if (real(state, seat, 3) > 0.0) & _is_finite(top) & is_filtered(state, seat, VOCAB):
        bin_ = tl.arange(0, _BINS)
        counts = tl.zeros([_BINS], tl.int32)
        earlier = tl.zeros([_BINS], tl.int32)  # in the parts before this one
        for part in range(0, splits):
            of_part = tl.load(bins + (row * splits + part) * _BINS + bin_)
            counts += of_part
            earlier += tl.where(part < split, of_part, 0)
        # The last bin holds everything far away, the columns beyond the vocabulary too.
        taken = (tl.cumsum(counts, 0) <= NEAR) & (bin_ < _BINS - 1)
        num_bins = tl.sum(taken.to(tl.int32), 0)
        at = tl.sum(tl.where(taken, earlier, 0), 0)
        if split == 0:
            tl.store(num_near + row, tl.sum(tl.where(taken, counts, 0), 0))
        first = split * split_blocks
        for block in range(first, tl.minimum(first + split_blocks, tl.cdiv(VOCAB, BLOCK))):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            values = load_logits(logits + row * stride, columns, VOCAB)
            hit = _bin(top - values) < num_bins
            found = tl.sum(hit.to(tl.int32), 0)
            if found > 0:
                place = row * NEAR + at + tl.cumsum(hit.to(tl.int32), 0) - 1
                tl.store(near + place, values, mask=hit)
                tl.store(near_ids + place, columns, mask=hit)
                at += found


@triton.jit
def _unfiltered_token(logits, sums, total, uniform, top, temperature, VOCAB, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Walk the vocabulary by id up to `uniform` of the weight."""
    num_blocks = tl.cdiv(VOCAB, BLOCK)
    target = tl.maximum(tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1), 0)
    b = tl.arange(0, BLOCKS)
    of_block = tl.load(sums + b, mask=b < num_blocks, other=0)
    passed = tl.cumsum(of_block, 0) <= target
    block = tl.sum(passed.to(tl.int32), 0)
    rest = target - tl.sum(tl.where(passed, of_block, 0), 0)
    values = load_logits(logits, block * BLOCK + tl.arange(0, BLOCK), VOCAB)
    ends = tl.cumsum(weights(values, top, temperature), 0)
    return (block * BLOCK + tl.sum((ends <= rest).to(tl.int32), 0)).to(tl.int64)


@triton.jit(do_not_specialize=["splits"])
def choose(
    logits,
    stride,
    seats,
    state,
    last_token,
    token_ids,
    best,
    sums,
    near,
    near_ids,
    num_near,
    splits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NEAR: tl.constexpr,
    SHIFT: tl.constexpr,
    DRAWN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """token_ids[row] = last_token[seat] = the row's token; one output more for its seat."""
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    top, token = _best_of_row(best, row, splits, SPLITS)
    outputs = tl.load(state + seat * 6 + 1)
    if DRAWN:
        temperature = real(state, seat, 3)
        if (temperature > 0.0) & _is_finite(top):
            num_blocks = tl.cdiv(VOCAB, BLOCK)
            b = tl.arange(0, BLOCKS)
            total = tl.sum(tl.load(sums + row * num_blocks + b, mask=b < num_blocks, other=0), 0)
            uniform = uniform_of(tl.load(state + seat * 6), outputs)
            unfiltered = True
            if FILTERED:
                unfiltered = not is_filtered(state, seat, VOCAB)
            if unfiltered:
                token = _unfiltered_token(
                    logits + row * stride, sums + row * num_blocks, total, uniform, top, temperature,
                    VOCAB, BLOCK, BLOCKS,
                )  # fmt: skip
            elif FILTERED:
                token = filtered_token(
                    logits + row * stride, near + row * NEAR, near_ids + row * NEAR, tl.load(num_near + row),
                    state, seat, total, uniform, top, temperature, VOCAB, NEAR, BLOCK // 2, SHIFT,
                )  # fmt: skip
    tl.store(token_ids + row, token)
    tl.store(last_token + seat, token)
    tl.store(state + seat * 6 + 1, outputs + 1)
