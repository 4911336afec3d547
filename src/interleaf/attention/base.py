"""What an attention backend is asked, and what it answers. No implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from interleaf.kernels.rotary import RopeAngles
from interleaf.memory.page_table import Ints, PageTable


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Tokens [first, first + count) of a seat's sequence; all tokens before `first` are in the pool already."""

    seat: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one step: one per decode seat, then those of the chunks.

    Attributes:
        table: page tables, and lengths before this step. Read by `prepare` only.
        decode: [N] seats; each row's position is its seat's length.
    """

    table: PageTable
    decode: Ints
    chunks: tuple[ChunkRows, ...] = ()


class StepAttention(Protocol):
    """Attention of one step, the same for every layer but for the layer's number."""

    def forward(self, layer: int, qkv: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
        """Rotate q and k, write k and v to the pool, then let every row attend to its sequence up to itself, included.

        Args:
            qkv: [T, heads + 2 * kv_heads, head_dim], not rotated yet; may be overwritten. Query head h reads KV head
                h // (heads / kv_heads).
            angles: of the rows' positions.
        Returns: [T, heads * head_dim].
        """


class AttentionBackend(Protocol):
    """Knows the pool; works out once per step what every layer shares."""

    def prepare(self, rows: AttentionRows) -> StepAttention:
        """Index arrays and masks of one step. Later changes of the table do not affect it."""
