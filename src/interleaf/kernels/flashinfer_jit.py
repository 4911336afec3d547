"""FlashInfer's kernels, compiled and loaded. Knows which exist for us; not what they compute. Imports it when asked.

FlashInfer compiles with nvcc when a kernel is first wanted, and keeps the libraries in a folder that holds its version
and the GPU's architecture: `cache_folder()`. It lies under FLASHINFER_WORKSPACE_BASE, else the home folder. Its own
loader asks ninja each time whether sources are newer, which rebuilds everything where a package was installed after the
libraries were made (a cache carried to another machine); here a library that is there is loaded.

Source: flashinfer-python 0.6.11, flashinfer/jit. The functions of its libraries are not its public interface, whose
wrappers copy, allocate and count in Python at every step; the version is therefore pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HALF_TYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


@cache
def is_installed() -> bool:
    """Whether FlashInfer is there. Imports nothing."""
    return find_spec("flashinfer") is not None


_given_up = False


def give_up() -> None:
    """Its kernels cannot be had in this process, whatever is installed: everything runs on our own from now on."""
    global _given_up
    _given_up = True


def is_usable() -> bool:
    """Whether FlashInfer is installed and nobody has given it up."""
    return is_installed() and not _given_up


def computes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashInfer is usable and has attention for this dtype and size of heads."""
    return is_usable() and dtype in HALF_TYPES and head_dim in HEAD_DIMS


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels may be launched before the last one has ended (programmatic dependent launch, Hopper and on).

    FlashInfer's then wait before they read or write what other kernels write; plans and page lists they read at once.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def cache_folder() -> Path:
    """Where compiled kernels are kept: a folder per kernel, in it a library of its name."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_JIT_DIR)


@cache
def attention(dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    """Functions `plan` and `paged_run` of paged attention ("fa2"), for prefill and, with tensor cores, for decode."""
    return _load(_attention_spec(dtype, head_dim, windowed))


@cache
def norms() -> Any:
    """Functions `rmsnorm` and `fused_add_rmsnorm`.

    They are the library's CUDA kernels. What its Python functions call instead is compiled anew by every process.
    """
    return _load(_norm_spec())


@cache
def activations() -> Any:
    """Function `silu_and_mul`."""
    return _load(_activation_spec())


def build(
    dtype: torch.dtype,
    head_dim: int,
    windowed: bool,
    progress: Callable[[int, int], None] | None = None,
    *,
    attends: bool = True,
) -> None:
    """Compile what a model needs and is not in the cache, side by side.

    Args:
        progress: called with (kernels that are there, kernels in all), first and last, if some are not.
        attends: attention is among it.

    Raises: what the import, the compiler or the search for it raises.
    """
    from flashinfer.jit import build_jit_specs

    specs = [_norm_spec(), _activation_spec()]
    if attends:
        specs.insert(0, _attention_spec(dtype, head_dim, windowed))
    missing = [spec for spec in specs if not spec.is_compiled]
    if not missing:
        return
    if progress is not None:
        progress(len(specs) - len(missing), len(specs))
    build_jit_specs(missing)
    if progress is not None:
        progress(len(specs), len(specs))


def _attention_spec(dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    from flashinfer.jit import gen_batch_prefill_module

    no_rotary = 0
    soft_cap = half_sums = False
    return gen_batch_prefill_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, no_rotary, windowed, soft_cap, half_sums
    )


def _norm_spec() -> Any:
    from flashinfer.jit.norm import gen_norm_module

    return gen_norm_module()


def _activation_spec() -> Any:
    from flashinfer.jit import gen_act_and_mul_module

    return gen_act_and_mul_module("silu")


def _load(spec: Any) -> Any:
    if spec.is_compiled:
        try:
            return spec.load(spec.get_library_path())
        except Exception:  # half a library, left by a build that was killed: the build below makes it whole
            pass
    return spec.build_and_load()
