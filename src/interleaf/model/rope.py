"""Rotary position embedding: frequencies, and their application to q and k at once.

No table is kept: one step needs the angles of its own rows, once for all layers, and a table for a long context would
take more memory than an adapter.
Source: RoFormer (Su et al. 2021); Llama 3.1's scaling as published with its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from interleaf.core import RopeKind, RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair: [head_dim / 2] float32."""
    base = 1.0 / spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match spec.kind:
        case RopeKind.DEFAULT:
            return base
        case RopeKind.LINEAR:
            return base / spec.factor
        case RopeKind.LLAMA3:
            # Waves that fit the original context many times stay; those that hardly fit once are stretched; between the
            # two, by how often they fit.
            turns = spec.original_max_position * base / (2 * math.pi)
            kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
            kept = kept.clamp(0.0, 1.0)
            return base / spec.factor * (1 - kept) + base * kept


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """One step's rotations, shared by all layers.

    Attributes:
        cos: [T, 1, head_dim], both halves alike.   sin: [T, 1, head_dim / 2].
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """Turns positions into rotations. Angles are float32; cosine and sine are rounded to the model's dtype."""

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> RopeAngles:
        """Args: positions: [T] int64."""
        angle = positions.to(torch.float32)[:, None, None] * self._frequencies
        return RopeAngles(angle.cos().repeat(1, 1, 2).to(self._dtype), angle.sin().to(self._dtype))


def rotate(x: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    """Rotate element i of each head against element i + head_dim / 2 (Hugging Face's order).

    Args: x: [T, heads, head_dim]; not changed.
    Returns: a new tensor [T, heads, head_dim].
    """
    half = x.shape[-1] // 2
    out = x * angles.cos
    out[..., :half].addcmul_(x[..., half:], angles.sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], angles.sin)
    return out
