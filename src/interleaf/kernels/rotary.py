"""Rotary position embedding applied to q and k: what it means, in plain torch. Knows no frequencies and no positions.

Source: RoFormer (Su et al. 2021), in the order of pairs that Hugging Face's checkpoints have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """One step's rotations, shared by all layers.

    Attributes:
        cos: [T, 1, head_dim], both halves alike.   sin: [T, 1, head_dim / 2].
    """

    cos: torch.Tensor
    sin: torch.Tensor


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
