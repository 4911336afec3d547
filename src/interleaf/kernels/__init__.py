"""What the device computes for LoRA, out of pages. Knows layouts and page ids; not what a model or a request is."""

from interleaf.kernels.ops import lora_add
from interleaf.kernels.work import LoraWork, PooledAdapter, build_work

__all__ = ["LoraWork", "PooledAdapter", "build_work", "lora_add"]
