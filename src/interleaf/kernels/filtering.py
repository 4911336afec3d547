"""What top-k, top-p and min-p leave of a row, and a draw from it, without sorting. Triton; knows one row's logits.

"The most probable tokens that ..." is a question of where a sum crosses a threshold as one walks the logits from the
largest down: a sum of ones for top-k, of weights for top-p and for the draw itself. The place is found bit by bit, as
the *depth* below the largest logit counted in the numbers that the logits' type can hold, by summing over the list once
per bit. Depths, counts and weights are whole numbers, so that ties and thresholds are met exactly.

The list is the row's few thousand largest logits where that suffices; if the tokens kept may not end within them, it is
the whole row.

Source: the order of the filters and what they keep is sampling_math.Filters.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def real(state, seat, field: tl.constexpr):
    """A float64 of a seat's state."""
    return tl.load(state + seat * 6 + field).to(tl.float64, bitcast=True)


@triton.jit
def is_filtered(state, seat, VOCAB: tl.constexpr):
    """Whether top_k, top_p or min_p takes anything away."""
    return (tl.load(state + seat * 6 + 2) < VOCAB) | (real(state, seat, 4) < 1.0) | (real(state, seat, 5) > 0.0)


@triton.jit
def uniform_of(key, index):
    """sampling_math.uniforms of one stream."""
    z = key.to(tl.uint64, bitcast=True) + (index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def key_of(values):
    """Integers in the order of float32 values: int32, symmetrical about 0, so that both zeros are equal."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def value_of(keys):
    """The inverse of `key_of`."""
    return tl.where(keys < 0, -2147483648 - keys, keys).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, columns, count):
    """Logits as float32; minus infinity for NaN and from `count` on."""
    values = tl.load(logits + columns, mask=columns < count, other=float("-inf")).to(tl.float32)
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def weights(values, top, temperature):
    """sampling_math's weights: exp((value - top) / temperature), int64 in units of 2**-40.

    The usual exp2(x * log2(e)) would be wrong in the sixth digit where x is large, and this must agree with the CPU's:
    the whole powers of two are split off first (Cody and Waite 1980). Units that divide and round do so 16 times a
    cycle, an eighth of what sums take; so a quotient is a product, corrected once (Markstein 1990), and adding
    1.5 * 2**23 leaves a rounded number in the low bits.
    """
    scale = tl.maximum(temperature.to(tl.float32), _TINY)
    inverse = tl.math.div_rn(1.0, scale)
    gap = values - top
    rough = tl.maximum(gap * inverse, -128.0)
    x = tl.maximum(tl.fma(tl.fma(-rough, scale, gap), inverse, rough), -64.0)  # which weighs nothing
    rounded = tl.fma(x, 1.4426950408889634, 12582912.0)
    power = rounded - 12582912.0
    rest = tl.fma(power, 2.12194440e-4, tl.fma(power, -0.693359375, x))
    unit = ((rounded.to(tl.int32, bitcast=True) << 23) + ((127 + 40) << 23)).to(tl.float32, bitcast=True)
    return (tl.exp2(rest * 1.4426950408889634) * unit).to(tl.int64)


@triton.jit
def _depth(values, top, SHIFT: tl.constexpr):
    """Numbers of the logits' type between each value and the largest: uint32."""
    return (key_of(top) - key_of(values)).to(tl.uint32, bitcast=True) >> SHIFT


@triton.jit
def _at_depth(depth, top, SHIFT: tl.constexpr):
    """The value at a depth."""
    return value_of((key_of(top).to(tl.int64) - (depth << SHIFT)).to(tl.int32))


@triton.jit
def _entries(values, first, count, top, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(depths, weights) of the entries of a list from `first` on; what is beyond it weighs nothing and is deepest."""
    at = first + tl.arange(0, BLOCK)
    listed = load_logits(values, at, count)
    return tl.where(at < count, _depth(listed, top, SHIFT), 0xFFFFFFFF), weights(listed, top, temperature)


@triton.jit
def _survey(values, count, top, temperature, floor, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(greatest depth, weight, entries that weigh at least `floor`) of a list."""
    greatest = tl.zeros([BLOCK], tl.uint32)
    total = tl.zeros([BLOCK], tl.int64)
    heavy = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        depths, each = _entries(values, first, count, top, temperature, SHIFT, BLOCK)
        listed = first + tl.arange(0, BLOCK) < count
        greatest = tl.maximum(greatest, tl.where(listed, depths, 0))
        total += each
        heavy += (listed & (each >= floor)).to(tl.int32)
    return tl.max(greatest, 0).to(tl.int64), tl.sum(total, 0), tl.sum(heavy, 0).to(tl.int64)


@triton.jit
def _sum_above(
    values,
    count,
    depths,
    each,
    depth,
    top,
    temperature,
    OF_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The number, or the weight, of the entries above a depth. HELD: the list is all in `depths` and `each`."""
    if HELD:
        above = depths < depth.to(tl.uint32)
        if OF_WEIGHT:
            found = tl.where(above, each, 0)
        else:
            found = above.to(tl.int32)
    else:
        found = tl.zeros([BLOCK], tl.int64 if OF_WEIGHT else tl.int32)
        for first in range(0, count, BLOCK):
            depths, each = _entries(values, first, count, top, temperature, SHIFT, BLOCK)
            above = depths < depth.to(tl.uint32)
            if OF_WEIGHT:
                found += tl.where(above, each, 0)
            else:
                found += above.to(tl.int32)
    return tl.sum(found, 0).to(tl.int64)


@triton.jit
def _crossing(
    values,
    count,
    depths,
    each,
    threshold,
    steps,
    top,
    temperature,
    OF_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """Where the number, or the weight, of a list's entries reaches `threshold`, from the largest down.

    Args: steps: the power of two above the greatest depth.
    Returns: (depth of the entry that reaches it, number or weight of all entries above that depth).
    """
    depth = steps * 0
    passed = steps * 0
    step = steps // 2
    while step > 0:
        found = _sum_above(
            values, count, depths, each, depth + step, top, temperature, OF_WEIGHT, SHIFT, BLOCK, HELD
        )  # fmt: skip
        depth = tl.where(found < threshold, depth + step, depth)
        passed = tl.where(found < threshold, found, passed)
        step = step // 2
    return depth, passed


@triton.jit
def _least_reaching(mass):
    """The least whole number that is at least `mass` once it is a float64."""
    least = tl.ceil(mass).to(tl.int64)
    while (least - 1).to(tl.float64) >= mass:
        least -= 1
    return least


@triton.jit
def _draw(
    values,
    count,
    state,
    seat,
    total,
    uniform,
    top,
    temperature,
    VOCAB: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """Filter and draw from the `count` largest logits of a row.

    Args: total: weight of the whole row.   HELD: the list is no longer than BLOCK.
    Returns: (1 if they were enough to tell, the value drawn as a depth, which of the entries of that value by id).
    """
    top_k = tl.load(state + seat * 6 + 2)
    top_p = real(state, seat, 4)
    min_p = real(state, seat, 5)
    floor = tl.ceil(min_p * 1099511627776.0).to(tl.int64)
    deepest, listed, heavy = _survey(values, count, top, temperature, floor, SHIFT, BLOCK)
    steps = deepest * 0 + 1
    while steps <= deepest:
        steps = steps * 2
    depths, each = _entries(values, 0, count, top, temperature, SHIFT, BLOCK)

    # As sampling_math._num_kept. Where all that is listed is likely enough for min_p, more may be beyond the list.
    open_ended = (min_p > 0.0) & (heavy == count) & (count < VOCAB)
    likely = tl.where((min_p > 0.0) & (heavy < count), heavy, VOCAB)
    limit = tl.maximum(tl.minimum(top_k, likely), 1)
    settled = limit <= count
    kept = total
    if settled & (limit < VOCAB):
        depth, number = _crossing(
            values, count, depths, each, limit, steps, top, temperature, False, SHIFT, BLOCK, HELD
        )  # fmt: skip
        above = _sum_above(values, count, depths, each, depth, top, temperature, True, SHIFT, BLOCK, HELD)
        kept = above + (limit - number) * weights(_at_depth(depth, top, SHIFT), top, temperature)
    if top_p < 1.0:
        known = settled | ((limit == VOCAB) & (not open_ended))
        least = _least_reaching(kept.to(tl.float64) * top_p)
        settled = known & (least <= listed)
        if settled:
            depth, above = _crossing(
                values, count, depths, each, least, steps, top, temperature, True, SHIFT, BLOCK, HELD
            )  # fmt: skip
            unit = tl.maximum(weights(_at_depth(depth, top, SHIFT), top, temperature), 1)
            kept = above + tl.cdiv(least - above, unit) * unit

    drawn = steps * 0
    tie = steps * 0
    if settled:
        target = tl.maximum(tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1), 0)
        drawn, above = _crossing(
            values, count, depths, each, target + 1, steps, top, temperature, True, SHIFT, BLOCK, HELD
        )  # fmt: skip
        tie = (target - above) // tl.maximum(weights(_at_depth(drawn, top, SHIFT), top, temperature), 1)
    return settled, drawn, tie


@triton.jit
def _place_of(values, count, depth, nth, top, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Where in a list the entry number `nth` of those at a depth stands."""
    place = nth * 0
    seen = nth * 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        hit = (at < count) & (_depth(load_logits(values, at, count), top, SHIFT) == depth.to(tl.uint32))
        number = tl.sum(hit.to(tl.int32), 0).to(tl.int64)
        if (seen <= nth) & (nth < seen + number):
            order = tl.cumsum(hit.to(tl.int32), 0)
            place = tl.sum(tl.where(hit & (order == nth - seen + 1), at, 0), 0).to(tl.int64)
        seen += number
    return place


@triton.jit
def filtered_token(
    logits,
    near,
    near_ids,
    num_near,
    state,
    seat,
    total,
    uniform,
    top,
    temperature,
    VOCAB: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The token drawn from what a row's filters leave.

    Args:
        near, near_ids: the row's `num_near` largest logits (float32) and their ids, by id.
        total: the row's weight.   uniform: in [0, 1).   top: the largest logit, finite.   temperature: above 0.
        SHIFT: low bits of a float32 that are 0 in all numbers of the logits' type.
    Returns: int64.
    """
    settled, depth, tie = _draw(
        near, num_near, state, seat, total, uniform, top, temperature, VOCAB, SHIFT, NEAR, True
    )  # fmt: skip
    if settled:
        at = _place_of(near, num_near, depth, tie, top, SHIFT, NEAR)
        token = tl.load(near_ids + at).to(tl.int64)
    else:
        _, depth, tie = _draw(
            logits, VOCAB, state, seat, total, uniform, top, temperature, VOCAB, SHIFT, BLOCK, False
        )  # fmt: skip
        token = _place_of(logits, VOCAB, depth, tie, top, SHIFT, BLOCK)
    return token
