"""From q, k, v and a page table to o. Knows the pool and its tables; not the model around it."""

from interleaf.attention.base import AttentionBackend, AttentionRows, ChunkRows, StepAttention
from interleaf.attention.torch_sdpa import TorchSdpa

__all__ = ["AttentionBackend", "AttentionRows", "ChunkRows", "StepAttention", "TorchSdpa"]
