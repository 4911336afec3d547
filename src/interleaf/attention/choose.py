"""Which backend a GPU's attention runs on. Knows their conditions; imports the one that is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from interleaf.attention.device import DeviceAttention
from interleaf.config import EngineConfig
from interleaf.core import ModelSpec
from interleaf.errors import ConfigError
from interleaf.kernels import flashinfer_jit
from interleaf.memory.pool import PagePool
from interleaf.parallel.shard import Shard

logger = logging.getLogger(__name__)


def choose_attention(pool: PagePool, shard: Shard, dtype: torch.dtype, config: EngineConfig) -> DeviceAttention:
    """The backend that `config.attention` names; for "auto" FlashInfer where it can be had, else our own kernels.

    Raises: ConfigError: the backend named cannot be had, or does not compute this model.
    """
    heads, window, is_gpu = shard.heads.count, shard.spec.sliding_window, pool.data.is_cuda
    if config.attention == "flashinfer" and not (is_gpu and flashinfer_jit.is_installed()):
        missing = "the package flashinfer-python, which the extra `gpu` brings" if is_gpu else "a GPU"
        raise ConfigError(f"attention='flashinfer' needs {missing}")
    if config.attention == "flashinfer" or (
        config.attention == "auto" and is_gpu and flashinfer_jit.computes(dtype, shard.spec.head_dim)
    ):
        from interleaf.attention.flashinfer import FlashInferPaged

        return FlashInferPaged(pool, heads, window=window, max_seqs=config.max_num_seqs)
    from interleaf.attention.triton_paged import TritonPaged

    return TritonPaged(pool, heads, window=window, max_seqs=config.max_num_seqs, max_rows=config.max_batch_tokens)


def build_kernels(
    spec: ModelSpec, dtype: torch.dtype, config: EngineConfig, progress: Callable[[str, int, int], None] | None = None
) -> None:
    """Compile FlashInfer's kernels for a model, unless they lie in its cache: tens of seconds, once per machine.

    Does nothing where FlashInfer is not used. Triton's kernels need no such step: they compile in less, one by one.
    Where it is installed but broken, or there is no compiler, everything runs on our own kernels, and a line of the
    log says why.

    Args:
        progress: called with ("kernels", done, all) before, if anything must be compiled, and after.

    Raises: ConfigError: it was asked for by name and cannot be had.
    """
    if not flashinfer_jit.is_usable() or dtype not in flashinfer_jit.HALF_TYPES:
        return
    attends = config.attention != "triton" and flashinfer_jit.computes(dtype, spec.head_dim)
    try:
        flashinfer_jit.build(
            dtype,
            spec.head_dim,
            spec.sliding_window is not None,
            progress and (lambda *n: progress("kernels", *n)),
            attends=attends,
        )
    except Exception as error:
        if config.attention == "flashinfer":
            raise ConfigError(f"attention='flashinfer': its kernels cannot be had: {_first_line(error)}") from error
        logger.warning("FlashInfer's kernels cannot be had, our own are used: %s", _first_line(error))
        flashinfer_jit.give_up()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
