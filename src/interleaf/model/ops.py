"""What is computed between the products of a layer, and who computes it on which device. Computes nothing itself.

The choice is made once, when a model is loaded: torch on a CPU; on a GPU FlashInfer's kernels if they can be had and
the model is in 16 bits (they know no float32), else our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from interleaf.errors import ConfigError
from interleaf.kernels import flashinfer_jit
from interleaf.model.layers import RmsNorm, swiglu


class Norm(Protocol):
    """An RMS norm with its weight, over rows [T, n]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns: a new tensor of x's shape and dtype."""

    def add(self, y: Tensor, h: Tensor) -> Tensor:
        """h += y, in place. Returns: the norm of h; y may hold it afterwards."""


class HeadNorm(Protocol):
    """An RMS norm with a weight for each head, over rows [T, heads, n]."""

    def in_place(self, x: Tensor) -> None:
        """x = norm(x); x may be a part of a larger tensor, its last axis contiguous."""


@dataclass(frozen=True, slots=True)
class RowOps:
    """Makes or computes what lies between products.

    Attributes:
        norm: (weight [n], eps) -> Norm.
        head_norm: (weight [heads, n], eps) -> HeadNorm.
        swiglu: silu(gate) * up.   gate_up: [T, 2 * n].   Returns: [T, n], a new tensor.
        angles: (positions [T], frequencies [n], dtype) -> cosines [T, 1, 2 * n], sines [T, 1, n] of their products.
    """

    norm: Callable[[Tensor, float], Norm]
    head_norm: Callable[[Tensor, float], HeadNorm]
    swiglu: Callable[[Tensor], Tensor]
    angles: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def choose_row_ops(device: torch.device, dtype: torch.dtype) -> RowOps:
    """The fastest ops for a device and dtype.

    Raises: ConfigError: float32 on a GPU, and torch has been told to multiply it in tf32, which has 10 bits.
    """
    if device.type == "cpu":
        return RowOps(RmsNorm, RmsNorm, swiglu, angles)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        raise ConfigError(
            f"dtype float32 needs torch.set_float32_matmul_precision('highest'), "
            f"it is {torch.get_float32_matmul_precision()!r}: products would be rounded to tf32"
        )
    from interleaf.model import fused

    if flashinfer_jit.is_usable() and dtype in flashinfer_jit.HALF_TYPES:
        return RowOps(fused.FlashInferNorm, fused.TritonNorm, fused.flashinfer_swiglu, fused.triton_angles)
    return RowOps(fused.TritonNorm, fused.TritonNorm, fused.triton_swiglu, fused.triton_angles)


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See RowOps."""
    angle = positions.to(torch.float32)[:, None, None] * frequencies
    return angle.cos().repeat(1, 1, 2).to(dtype), angle.sin().to(dtype)
