"""The ops between products on a GPU, one kernel each. Knows launches; see RowOps for what they compute.

All of them can be captured in a CUDA graph: shapes and pointers are all that a launch depends on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interleaf.kernels import flashinfer_jit, rowwise


class TritonNorm:
    """Our kernels, for every dtype. Weights are [n], or [heads, n] for rows of heads."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        width = weight.shape[-1]
        self._shape = {"WIDTH": width, "BLOCK": _power_of_two(width), "num_warps": min(8, max(1, width // 512))}

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if len(x):
            rowwise.rms_norm[(len(x), 1)](
                x, x.stride(0), 0, self._weight, 0, out, out.stride(0), 0, self._eps, **self._shape
            )
        return out

    def add(self, y: Tensor, h: Tensor) -> Tensor:
        if len(y):
            rowwise.add_rms_norm[(len(y),)](y, h, self._weight, self._eps, **self._shape)
        return y

    def in_place(self, x: Tensor) -> None:
        if len(x):
            strides = (x.stride(0), x.stride(1))
            rowwise.rms_norm[x.shape[:2]](
                x, *strides, self._weight, self._weight.stride(0), x, *strides, self._eps, **self._shape
            )


class FlashInferNorm:
    """FlashInfer's kernels, for 16 bits."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._early = flashinfer_jit.launches_early(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if len(x):
            flashinfer_jit.norms().rmsnorm(out, x, self._weight, self._eps, self._early)
        return out

    def add(self, y: Tensor, h: Tensor) -> Tensor:
        if len(y):
            flashinfer_jit.norms().fused_add_rmsnorm(y, h, self._weight, self._eps, self._early)
        return y


def triton_swiglu(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        block = min(_power_of_two(width), 1024)
        rowwise.swiglu[(rows, -(-width // block))](gate_up, out, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def flashinfer_swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    if len(out):
        flashinfer_jit.activations().silu_and_mul(out, gate_up, flashinfer_jit.launches_early(out.device))
    return out


def triton_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, half = len(positions), len(frequencies)
    cos = torch.empty(rows, 1, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty(rows, 1, half, dtype=dtype, device=positions.device)
    if rows:
        rowwise.rope_angles[(rows,)](
            positions, frequencies, cos, sin, HALF=half, BLOCK=_power_of_two(half), num_warps=1
        )
    return cos, sin


def _power_of_two(n: int) -> int:
    """The lowest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
