"""Logits of rows that are penalised, copied out and changed in one pass. Triton; knows counts, not sequences."""

import triton
import triton.language as tl


@triton.jit
def penalise(logits, stride, rows, slots, seen, strength, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = logits[rows[i]] as float32, penalised by what slots[i] has seen; slot -1: nothing.

    Args:
        seen: [slots, VOCAB] int16, twice the times that a token is among the outputs, plus one if it is in the prompt.
        strength: [N, 3] float32, repetition, presence and frequency penalty.
    Source: engine/penalties.py says what the penalties are, and in which order they round.
    """
    i = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < VOCAB
    row = tl.load(rows + i)
    slot = tl.load(slots + i)
    values = tl.load(logits + row * stride + columns, mask=inside).to(tl.float32)
    if slot >= 0:
        counted = tl.load(seen + slot * VOCAB + columns, mask=inside, other=0).to(tl.int32)
        outputs = counted >> 1
        repetition = tl.load(strength + i * 3)
        presence = tl.load(strength + i * 3 + 1)
        frequency = tl.load(strength + i * 3 + 2)
        scaled = tl.where(values > 0, tl.math.div_rn(values, repetition), values * repetition)
        values = tl.where(counted > 0, scaled, values)
        lowered = values - presence - frequency * outputs.to(tl.float32)
        values = tl.where(outputs > 0, lowered, values)
    tl.store(out + i * VOCAB + columns, values, mask=inside)
