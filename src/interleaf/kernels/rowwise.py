"""The small ops between a decoder's products: norms, SwiGLU, rotary angles. Knows rows and strides only. Triton.

Everything is computed in float32 and rounded once, where it is stored. One program per row or piece of a row; nothing
depends on the number of rows but the grid, so that a step of any size runs what was compiled at start.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    x_row,
    x_head,
    weight,
    weight_head,
    out,
    out_row,
    out_head,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, h] = x[t, h] / sqrt(mean(x[t, h]^2) + eps) * weight[h], for one row t and head h; out may be x."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    wide = tl.load(x + row * x_row + head * x_head + i, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + head * weight_head + i, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out + row * out_row + head * out_head + i, wide * scale * w, mask=inside)


@triton.jit
def add_rms_norm(y, h, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """h += y, then y = rms_norm(h), for one row of both. y, h: [T, WIDTH], contiguous."""
    at = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    step = tl.load(y + at + i, mask=inside, other=0.0).to(tl.float32)
    total = (tl.load(h + at + i, mask=inside, other=0.0).to(tl.float32) + step).to(h.dtype.element_ty)
    tl.store(h + at + i, total, mask=inside)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(y + at + i, wide * scale * w, mask=inside)


@triton.jit
def swiglu(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up, for one piece of one row.   gate_up: [T, 2 * WIDTH], out: [T, WIDTH], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def rope_angles(positions, frequencies, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """cos[t] = cos(a), twice over, and sin[t] = sin(a), with a = positions[t] * frequencies.

    positions: [T] int64.   frequencies: [HALF] float32.   cos: [T, 2 * HALF], sin: [T, HALF], contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + i, mask=inside, other=0.0)
    c = tl.cos(angle)
    tl.store(cos + row * 2 * HALF + i, c, mask=inside)
    tl.store(cos + row * 2 * HALF + HALF + i, c, mask=inside)
    tl.store(sin + row * HALF + i, tl.sin(angle), mask=inside)
