"""From qkv, rotations and a page table to o. Knows the pool and its tables; not the model around it."""

from interleaf.attention.base import AttentionBackend, AttentionRows, ChunkRows, StepAttention
from interleaf.attention.choose import build_kernels, choose_attention
from interleaf.attention.device import DeviceAttention, DeviceRows
from interleaf.attention.torch_sdpa import TorchSdpa

__all__ = [
    "AttentionBackend",
    "AttentionRows",
    "ChunkRows",
    "DeviceAttention",
    "DeviceRows",
    "StepAttention",
    "TorchSdpa",
    "build_kernels",
    "choose_attention",
]
