"""What a GPU can do, in four numbers. Knows no model; whether software reaches the numbers is `fit`'s question."""

from __future__ import annotations

from dataclasses import dataclass

from interleaf.errors import ConfigError

_MEMORY, _COMPUTE, _LINK = 0.90, 0.80, 0.80
"""Measured on an H200 over its vendor's figures: 4.3 of 4.8 TB/s (copy), 790 of 989 TFLOP/s (bf16 product), 51 of 64
GB/s (pinned host memory to device). The other GPUs' vendor figures are multiplied by these."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and its link to host memory.

    Attributes:
        bandwidth_bytes_s: of its own memory.
        flops_s: 16-bit matrix products with 32-bit sums, dense.
        link_bytes_s: host to device, one way; the other way at the same rate, beside it.
        source: where the figures come from.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    flops_s: float
    link_bytes_s: float
    source: str


def _from_vendor(name: str, memory_gb: float, gb_s: float, tflops: float, link_gb_s: float, sheet: str) -> Gpu:
    return Gpu(
        name, memory_gb * 1e9, gb_s * 1e9 * _MEMORY, tflops * 1e12 * _COMPUTE, link_gb_s * 1e9 * _LINK,
        f"{sheet}: {gb_s:g} GB/s x {_MEMORY}, {tflops:g} TFLOP/s x {_COMPUTE}, link {link_gb_s:g} GB/s x {_LINK}",
    )  # fmt: skip


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 141e9, 4.3e12, 790e12, 51e9, "measured on one: copy, bf16 product, pinned copy"),
        _from_vendor("h100", 80, 3350, 989, 64, "NVIDIA H100 SXM data sheet, PCIe 5.0 x16"),
        _from_vendor("a100-80", 80, 2039, 312, 32, "NVIDIA A100 80GB SXM data sheet, PCIe 4.0 x16"),
        _from_vendor("l40s", 48, 864, 362, 32, "NVIDIA L40S data sheet, PCIe 4.0 x16"),
        _from_vendor("a10g", 24, 600, 70, 32, "NVIDIA A10G data sheet, PCIe 4.0 x16"),
    )
}


def find_gpu(name: str) -> Gpu:
    """A GPU by name. Raises: ConfigError: it is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]
