"""The op between a step's qkv product and its attention: rotates q and k, and puts k and v into the pool."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from interleaf.kernels.launcher import ALIGNMENT, Launcher
from interleaf.kernels.rotary import RopeAngles

_BLOCK_ELEMS = 1024
"""Elements of half heads that a program takes: 16 bytes of each half for each of its 128 threads."""


def rotate_and_append(qkv: Tensor, angles: RopeAngles, slots: Tensor, pool: Tensor, layer: int) -> Tensor:
    """Rotate q and k by their row's angles; keep k and v where their row's slot is. One launch.

    Semantics: with page, offset = divmod(slots[t], page_tokens),
    pool[page, layer, 0, offset] = rotate(k[t]), pool[page, layer, 1, offset] = v[t], result[t] = rotate(q[t]).
    Values are rounded as `rotate` rounds them: in 16 bits the result is the same to the bit.

    Args:
        qkv: [T, heads + 2 * kv_heads, head_dim], contiguous; not changed.
        angles: of the T rows.
        slots: [T] int64, page * page_tokens + offset. Where two rows have one slot, either's values are kept.
        pool: [P, L, 2, page_tokens, kv_heads, head_dim], contiguous; P * L may exceed 2**31 elements.
    Returns: q, rotated: [T, heads, head_dim], contiguous.
    Raises: ValueError: a shape, dtype or device does not fit; nothing was written.
    """
    _check(qkv, angles, slots, pool, layer)
    tokens, all_heads, head_dim = qkv.shape
    page_tokens, kv_heads = pool.shape[3:5]
    heads = all_heads - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, head_dim)
    half = 1 << (head_dim // 2 - 1).bit_length()
    block_heads = min(1 << (all_heads - 1).bit_length(), max(1, _BLOCK_ELEMS // half))
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": page_tokens,
        "PAGE_ELEMS": pool.stride(0),
        "BLOCK_HEADS": block_heads,
        "BLOCK_HALF": half,
        "PDL": qkv.is_cuda,
    }
    options = {"num_warps": 4, **({"launch_pdl": True} if qkv.is_cuda else {})}
    addressed = (qkv, angles.cos, angles.sin, slots, pool, q)
    kind = (qkv.device.index, qkv.dtype, *constants.values(), *(x.data_ptr() % ALIGNMENT for x in addressed))
    grid = (tokens, -(-all_heads // block_heads), 1)
    _launcher().launch(kind, grid, (*addressed[:5], layer, q), constants, options)
    return q


@cache
def _launcher() -> Launcher:
    from interleaf.kernels.kv_append import rotate_append

    return Launcher(rotate_append)


def _check(qkv: Tensor, angles: RopeAngles, slots: Tensor, pool: Tensor, layer: int) -> None:
    if pool.dim() != 6 or not pool.is_contiguous() or not 0 <= layer < pool.shape[1]:
        raise ValueError(
            "pool must be contiguous [P, L, 2, page_tokens, kv_heads, head_dim] with layer < L, got "
            f"{list(pool.shape)} with strides {pool.stride()} and layer {layer}"
        )
    kv_heads, head_dim = pool.shape[4:]
    if qkv.dim() != 3 or qkv.shape[1] <= 2 * kv_heads or qkv.shape[2] != head_dim or not qkv.is_contiguous():
        raise ValueError(
            f"qkv must be contiguous [T, more than {2 * kv_heads}, {head_dim}], got {list(qkv.shape)} with strides "
            f"{qkv.stride()}"
        )
    tokens = qkv.shape[0]
    for name, x, shape in (("cos", angles.cos, (tokens, 1, head_dim)), ("sin", angles.sin, (tokens, 1, head_dim // 2))):
        if x.shape != shape or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)}, got {list(x.shape)} with strides {x.stride()}")
    if slots.shape != (tokens,) or not slots.is_contiguous() or slots.dtype != torch.int64:
        raise ValueError(
            f"slots must be contiguous [{tokens}] int64, got {list(slots.shape)} {slots.dtype} with strides "
            f"{slots.stride()}"
        )
    if len({qkv.dtype, angles.cos.dtype, angles.sin.dtype, pool.dtype}) != 1:
        raise ValueError(
            f"qkv, angles and pool must have one dtype, got {qkv.dtype}, {angles.cos.dtype}, {angles.sin.dtype} and "
            f"{pool.dtype}"
        )
    if len({qkv.device, angles.cos.device, slots.device, pool.device}) != 1:
        raise ValueError(
            f"qkv, angles, slots and pool must be on one device, got {qkv.device}, {angles.cos.device}, "
            f"{slots.device} and {pool.device}"
        )
