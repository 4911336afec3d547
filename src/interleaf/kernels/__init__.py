"""What the device computes for LoRA, out of pages. Knows layouts and page ids; not what a model or a request is."""

from interleaf.kernels.device_lora import DeviceLora, LoraStep
from interleaf.kernels.ops import lora_add
from interleaf.kernels.residents import SingleRows
from interleaf.kernels.work import LoraWork, PooledAdapter, build_work

__all__ = ["DeviceLora", "LoraStep", "LoraWork", "PooledAdapter", "SingleRows", "build_work", "lora_add"]
