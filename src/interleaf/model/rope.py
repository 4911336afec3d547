"""Rotary position embedding: which frequencies a model has, and a step's angles. Rotates nothing (kernels/rotary.py).

No table is kept: one step needs the angles of its own rows, once for all layers, and a table for a long context would
take more memory than an adapter.
Source: RoFormer (Su et al. 2021); Llama 3.1's scaling as published with its weights.
"""

from __future__ import annotations

import math

import torch

from interleaf.core import RopeKind, RopeSpec
from interleaf.kernels.rotary import RopeAngles
from interleaf.model.ops import RowOps


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


class Rope:
    """Turns positions into rotations. Angles are float32; cosine and sine are rounded to the model's dtype."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device, row_ops: RowOps
    ) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._dtype = dtype
        self._angles = row_ops.angles

    def angles(self, positions: torch.Tensor) -> RopeAngles:
        """Args: positions: [T] int64."""
        return RopeAngles(*self._angles(positions, self._frequencies, self._dtype))
