"""Puts a GPU's runner together, and says how much of the GPU's memory is left for the pool. Knows settings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interleaf.adapters.copy import StreamCopier
from interleaf.adapters.image import AdapterImage
from interleaf.attention import choose_attention
from interleaf.config import EngineConfig
from interleaf.core import AdapterUid
from interleaf.engine.cuda.device import CudaDevice
from interleaf.engine.cuda.host_memory import registered
from interleaf.engine.cuda.pieces import SMALL_STEP_ROWS
from interleaf.engine.cuda.runner import CudaRunner
from interleaf.engine.cuda.warm import WarmUp
from interleaf.engine.device_sampler import DeviceSampler
from interleaf.engine.swap import HostPages
from interleaf.errors import ConfigError
from interleaf.kernels.device_lora import DeviceLora
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Transformer
from interleaf.parallel.shard import Shard

_LIBRARIES_BYTES = 3 * 2**29
"""Work space of cuBLAS and of attention, kernels' code, captured graphs: 1.5 GiB."""


def require_gpu(name: str) -> torch.device:
    """The device of that name. Raises: ConfigError: there is none."""
    device = torch.device(name)
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise ConfigError(f"device={name!r}: this machine shows {count} CUDA devices")
    return torch.device("cuda", device.index or 0)


def pool_bytes(config: EngineConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> int:
    """Budget of the pool when the weights have been loaded: `memory`, or what its fraction leaves beside them.

    Raises: ConfigError: nothing is left.
    """
    fraction = config.memory_fraction
    if fraction is None:
        return config.memory_bytes
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    step = step_bytes(config, shard, dtype)
    left = int(fraction * total) - (total - free) - step
    if left <= 0:
        raise ConfigError(
            f"memory={fraction} of {total} bytes leaves nothing for the pool: {total - free} bytes are in use and a "
            f"step of max_batch_tokens={config.max_batch_tokens} needs {step}"
        )
    return left


def step_bytes(config: EngineConfig, shard: Shard, dtype: torch.dtype) -> int:
    """Memory that a step needs beside weights and pool: activations of the widest layer, once more for steps in pieces
    with what leads from piece to piece, sampling, tables, libraries.

    Logits are those of a step launched kernel by kernel and, with graphs, of captured steps and what they leave to be
    sampled outside. The table of pages counts twice, by seats and as lists.
    """
    spec, rows, seats = shard.spec, config.max_batch_tokens, config.max_num_seqs
    o = shard.heads.count * spec.head_dim
    qkv = o + 2 * shard.kv_heads.count * spec.head_dim
    row_bytes = (4 * spec.hidden_size + 2 * qkv + 3 * shard.intermediate.count) * dtype.itemsize
    activations = rows * row_bytes
    graph_rows = mixed_graph_rows(config) if config.max_graphs else 0
    graphs = graph_rows * (row_bytes + (2 * spec.hidden_size + qkv + o) * dtype.itemsize)
    logits = (3 if config.max_graphs else 1) * seats * spec.vocab_size * dtype.itemsize
    sampling = DeviceSampler.most_bytes(seats, spec.vocab_size, seats)
    longest = config.max_model_len or spec.max_position
    tables = 2 * (seats + 1) * (-(-longest // config.page_tokens) + 1) * torch.int32.itemsize
    return activations + graphs + logits + sampling + tables + _LIBRARIES_BYTES


def mixed_graph_rows(config: EngineConfig) -> int:
    """Rows of steps with prompts that replay graphs, at most: as many as seats, or as there are in a small step."""
    return max(config.max_num_seqs, min(SMALL_STEP_ROWS, config.max_batch_tokens))


def build_runner(
    config: EngineConfig,
    model: Transformer,
    pool: PagePool,
    image: Callable[[AdapterUid], AdapterImage],
    max_model_len: int,
    num_swap_slots: int,
    copy_page_s: Callable[[], float],
    progress: Callable[[int, int], None] | None = None,
) -> CudaRunner:
    """The runner of one GPU, warmed up.

    Args:
        pool: with the scrap page.
        image: of an adapter in the host tier.
        num_swap_slots: pages that host memory has room for.
        copy_page_s: seconds that the copy of an adapter's page takes, as far as is known.
        progress: of the warm-up.

    Raises: ConfigError: the pool has more tiles than the LoRA kernels can number, or there is no memory to swap to.
    """
    geometry, spec = pool.geometry, model.spec
    _require_countable(pool, model.shard)
    device = CudaDevice(pool.data.device)
    graph_rows = mixed_graph_rows(config)
    swap = None
    if num_swap_slots:
        swap = HostPages(pool, registered("swap_memory", num_swap_slots * geometry.page_bytes))
    runner = CudaRunner(
        device=device,
        model=model,
        pool=pool,
        attention=choose_attention(pool, model.shard, model.dtype, config),
        sampler=DeviceSampler(config.max_num_seqs, spec.vocab_size, device.torch_device, config.max_num_seqs),
        lora=DeviceLora(
            num_layers=geometry.num_layers,
            lane_elems=geometry.lane_elems,
            max_rows=graph_rows,
            device=device.torch_device,
        ),
        copier=StreamCopier(pool, image, device),
        num_seats=config.max_num_seqs,
        max_rows=config.max_batch_tokens,
        max_pages=geometry.pages_for_tokens(max_model_len) + 1,
        max_graphs=config.max_graphs,
        max_mixed_graph_rows=graph_rows,
        swap=swap,
        copy_page_s=copy_page_s,
    )
    WarmUp(
        runner,
        model.shard,
        geometry,
        num_pages=pool.num_pages - 1,
        num_seats=config.max_num_seqs,
        max_rows=config.max_batch_tokens,
        max_model_len=max_model_len,
    ).run(progress)
    return runner


def _require_countable(pool: PagePool, shard: Shard) -> None:
    geometry = pool.geometry
    tile = geometry.tile(shard.widths())
    most = (2**31 - 1) // (geometry.page_elems // tile)
    if pool.num_pages > most:
        raise ConfigError(
            f"a pool of {pool.num_pages} pages is too large for this model's tiles of {tile} elements: give memory of "
            f"{(most - 1) * geometry.page_bytes} bytes at most"
        )
