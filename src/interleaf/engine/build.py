"""Puts an engine together from settings: reads the model, sizes the pool, connects the rooms."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from interleaf.adapters.copy import AdapterCopier
from interleaf.adapters.disk_tier import DiskTier, open_folder
from interleaf.adapters.host_tier import HostTier
from interleaf.adapters.image import AdapterImage, require_tile
from interleaf.adapters.pinned import PinnedMemory
from interleaf.adapters.registry import Registry
from interleaf.adapters.residency import Residency
from interleaf.adapters.store import AdapterStore
from interleaf.attention import build_kernels
from interleaf.attention.torch_sdpa import TorchSdpa
from interleaf.config import EngineConfig
from interleaf.core import AdapterUid, ModelSpec, StreamOrder
from interleaf.engine.engine import Engine, Runner
from interleaf.engine.rates import ProbedImages, RateProbe, Rates, find_rates, nominal_rates, probe_image
from interleaf.engine.runner import TorchRunner
from interleaf.engine.sampler import Sampler
from interleaf.engine.swap import HostPages
from interleaf.errors import ConfigError, PoolTooSmall
from interleaf.memory.eviction import CostAware, EvictionPolicy, Lru
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from interleaf.memory.prefix import PrefixCache
from interleaf.memory.regions import Regions, pages_for_sequences
from interleaf.memory.swap import SwapSpace
from interleaf.model.spec import parse_spec
from interleaf.model.transformer import Transformer
from interleaf.parallel.shard import Shard
from interleaf.scheduler.admission import Admission, Conservative, Estimated, Optimistic
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.policy import Fcfs
from interleaf.scheduler.preemption import LatestArrival
from interleaf.scheduler.scheduler import Scheduler
from interleaf.weights.checkpoint import Checkpoint, open_checkpoint

_ADMISSION: dict[str, Callable[[], Admission]] = {
    "optimistic": Optimistic,
    "estimated": Estimated,
    "conservative": Conservative,
}


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The rooms of one running engine; `close` releases them.

    Attributes:
        rates: that the costs of pages were made of, for as long as the engine runs.
    """

    config: EngineConfig
    spec: ModelSpec
    geometry: PageGeometry
    max_model_len: int
    pool: PagePool
    allocator: Regions
    residency: Residency
    registry: Registry
    store: HostTier
    prefixes: PrefixCache | None
    scheduler: Scheduler
    runner: Runner
    rates: Rates
    engine: Engine
    fetcher: ThreadPoolExecutor

    def close(self) -> None:
        """End every request, wait for the last step, release threads and memory."""
        self.engine.close()
        self.fetcher.shutdown(cancel_futures=True)
        self.store.close()


def resolve_dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of weights, KV and adapters. On a CPU "auto" is float32, whatever the checkpoint is in."""
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    return torch.float32 if config.device == "cpu" else checkpoint.dtype


def page_geometry(shard: Shard, page_tokens: int, dtype: torch.dtype) -> PageGeometry:
    """One rank's pages. Raises: ConfigError: a stream of this model could not be cut in tiles."""
    geometry = PageGeometry(
        page_tokens, shard.spec.num_layers, shard.kv_heads.count, shard.spec.head_dim, dtype.itemsize
    )
    require_tile(shard, geometry)
    return geometry


def build_engine(
    model: str,
    config: EngineConfig,
    progress: Callable[[str, int, int], None] | None = None,
    make_store: Callable[[PageGeometry, torch.dtype], HostTier] | None = None,
) -> EngineParts:
    """Everything up to the first request.

    Args:
        make_store: makes another host tier than one that reads adapters in this process.

    Raises: ConfigError, ModelRejected, CheckpointError; PoolTooSmall: the longest sequence does not fit.
    """
    device = _device(config)
    is_gpu = device.type == "cuda"
    if config.adapter_disk_dir is not None:  # likewise refused before minutes of reading
        open_folder(config.adapter_disk_dir)
    checkpoint = open_checkpoint(model, config.load_format, config.seed or 0)
    try:
        spec = parse_spec(checkpoint.config, model)
        shard = Shard(spec)
        dtype = resolve_dtype(config, checkpoint)
        geometry = page_geometry(shard, config.page_tokens, dtype)
        if is_gpu:
            build_kernels(spec, dtype, config, progress)
        _num_swap_slots(config, geometry)  # a budget that is too small is refused before minutes of reading
        if config.memory_fraction is None:
            _max_model_len(config, spec, geometry, geometry.pages_for_bytes(config.memory_bytes))
        transformer = Transformer.load(spec, shard, checkpoint, dtype, device, progress and _named("weights", progress))
    finally:
        checkpoint.close()

    num_bytes = _pool_bytes(config, shard, dtype, device)
    num_pages = geometry.pages_for_bytes(num_bytes)
    max_model_len = _max_model_len(config, spec, geometry, num_pages)
    try:
        pool = PagePool(geometry, num_pages + is_gpu, dtype, device)  # a GPU's runner has the last page
    except RuntimeError as error:  # torch's word for an allocation that failed
        raise ConfigError(
            f"memory={config.memory}: a pool of {num_bytes} bytes cannot be had on {config.device}: {error}"
        ) from error
    allocator = Regions.of(num_pages, config.memory_split)
    residency = Residency(allocator.adapters, _eviction(config, geometry))
    region = allocator.for_sequences(residency.reclaimer.policy)
    idle = (region or residency).reclaimer
    prefixes = PrefixCache(allocator.sequences, idle, geometry.page_tokens) if config.prefix_cache else None
    fetcher = image_thread("adapter-fetch", config)
    store: HostTier
    if make_store is None:
        store = AdapterStore(
            spec,
            shard,
            geometry,
            dtype,
            config.adapter_host_memory_bytes,
            fetcher,
            order=stream_order(config),
            disk=disk_tier(config, geometry, dtype),
            prepare=PinnedMemory(config.adapter_host_memory_bytes).pin if is_gpu else None,
        )
    else:
        store = make_store(geometry, dtype)
    num_slots = _num_swap_slots(config, geometry)
    warm_up = progress and _named("warm-up", progress)
    images = ProbedImages(store.image)
    runner = _runner(
        config,
        transformer,
        pool,
        images,
        max_model_len,
        num_slots,
        lambda: residency.reclaimer.policy.costs.adapter_s,
        warm_up,
    )
    rates = find_rates(
        config,
        RateProbe(runner, images),
        geometry,
        max_model_len,
        lambda: _probe_image(config, shard, geometry, dtype, num_pages),
    )
    residency.reclaimer.policy.costs = rates.costs(geometry)
    scheduler = Scheduler(
        geometry=geometry,
        allocator=allocator.sequences,
        residency=residency,
        images=store,
        policy=Fcfs(),
        admission=_ADMISSION[config.admission](),
        preemption=LatestArrival(),
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        refill_seats=config.refill_seats,
        loads=LoadLimits(config.max_loads, config.prefetch_loads, config.load_timeout),
        prefixes=prefixes,
        swap=SwapSpace(num_slots, geometry.page_tokens, lambda: residency.reclaimer.policy.costs),
        region=region,
    )
    engine = Engine(scheduler, runner, lookahead=1 if config.overlap else 0)
    return EngineParts(
        config=config,
        spec=spec,
        geometry=geometry,
        max_model_len=max_model_len,
        pool=pool,
        allocator=allocator,
        residency=residency,
        registry=Registry(),
        store=store,
        prefixes=prefixes,
        scheduler=scheduler,
        runner=runner,
        rates=rates,
        engine=engine,
        fetcher=fetcher,
    )


def _eviction(config: EngineConfig, geometry: PageGeometry) -> EvictionPolicy:
    costs = nominal_rates(config).costs(geometry)  # until rates are found
    return Lru(costs) if config.eviction == "lru" else CostAware(costs)


def _probe_image(
    config: EngineConfig, shard: Shard, geometry: PageGeometry, dtype: torch.dtype, num_pages: int
) -> AdapterImage | None:
    """An image as the host tier would hold it; None: the pool is too small for any."""
    image = probe_image(shard, geometry, dtype, stream_order(config), num_pages)
    return image if image is None or config.device == "cpu" else PinnedMemory(0).pin(image)


def image_thread(name: str, config: EngineConfig) -> ThreadPoolExecutor:
    """One thread that works on adapters' images beside the steps."""
    return ThreadPoolExecutor(1, name, _begin_image_thread, (config.device,))


def _begin_image_thread(device: str) -> None:
    # One torch thread: laying out an adapter must not take the cores from the step that runs meanwhile.
    torch.set_num_threads(1)
    if device != "cpu":  # memory is registered in the context of the thread's device, which is the first by default
        torch.cuda.set_device(torch.device(device).index or 0)


def disk_tier(config: EngineConfig, geometry: PageGeometry, dtype: torch.dtype) -> DiskTier | None:
    """Where images go that leave host memory; None: nowhere. Raises: ConfigError: the folder cannot be used."""
    if config.adapter_disk_dir is None:
        return None
    folder, budget = open_folder(config.adapter_disk_dir), config.adapter_disk_memory_bytes
    thread = image_thread("adapter-disk", config)
    return DiskTier(folder, budget, geometry, dtype, thread, order=stream_order(config))


def stream_order(config: EngineConfig) -> StreamOrder:
    """The order of adapters' images that the device's kernels take (docs/adr/0010-image-order-per-device.md)."""
    return StreamOrder.ROWS if config.device == "cpu" else StreamOrder.TILES


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    from interleaf.engine.cuda.build import require_gpu

    return require_gpu(config.device)


def _pool_bytes(config: EngineConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return config.memory_bytes
    from interleaf.engine.cuda.build import pool_bytes

    return pool_bytes(config, shard, dtype, device)


def _runner(
    config: EngineConfig,
    transformer: Transformer,
    pool: PagePool,
    image: Callable[[AdapterUid], AdapterImage],
    max_model_len: int,
    num_swap_slots: int,
    copy_page_s: Callable[[], float],
    progress: Callable[[int, int], None] | None,
) -> Runner:
    if config.device != "cpu":
        from interleaf.engine.cuda.build import build_runner

        return build_runner(config, transformer, pool, image, max_model_len, num_swap_slots, copy_page_s, progress)
    return TorchRunner(
        model=transformer,
        attention=TorchSdpa(pool, transformer.spec.sliding_window),
        pool=pool,
        sampler=Sampler(config.max_num_seqs, transformer.spec.vocab_size, transformer.device),
        copier=AdapterCopier(pool, image),
        num_seats=config.max_num_seqs,
        overlap=config.overlap,
        swap=_host_pages(config, pool, num_swap_slots) if num_swap_slots else None,
    )


def _num_swap_slots(config: EngineConfig, geometry: PageGeometry) -> int:
    """Pages that may be swapped out at a time. Raises: ConfigError: there is memory for less than one."""
    if 0 < config.swap_memory_bytes < geometry.page_bytes:
        raise ConfigError(
            f"swap_memory={config.swap_memory_bytes} is less than a page, which takes {geometry.page_bytes} bytes: "
            "nothing could ever be swapped; give more, or 0 for none"
        )
    # Where nobody is ever preempted, nothing is ever swapped.
    return 0 if config.admission == "conservative" else geometry.pages_for_bytes(config.swap_memory_bytes)


def _host_pages(config: EngineConfig, pool: PagePool, num_slots: int) -> HostPages:
    try:
        return HostPages(pool, torch.zeros(num_slots * pool.geometry.page_bytes, dtype=torch.uint8))
    except RuntimeError as error:
        raise ConfigError(f"swap_memory={config.swap_memory}: so much memory cannot be had: {error}") from error


def _max_model_len(config: EngineConfig, spec: ModelSpec, geometry: PageGeometry, num_pages: int) -> int:
    """The longest sequence accepted. Raises: ConfigError: over the model's context; PoolTooSmall."""
    longest = config.max_model_len or spec.max_position
    if longest > spec.max_position:
        raise ConfigError(f"max_model_len={longest} is over the model's context of {spec.max_position} tokens")
    needed, split = geometry.pages_for_tokens(longest), config.memory_split
    total = pages_for_sequences(num_pages, split)
    if needed > total:
        enough = needed if split is None else int(needed / (1 - split))
        while pages_for_sequences(enough, split) < needed:
            enough += 1
        raise PoolTooSmall(
            f"a sequence of max_model_len={longest} tokens",
            needed,
            total,
            f"a page holds {geometry.page_tokens} tokens and takes {geometry.page_bytes} bytes ({geometry.num_layers} "
            f"layers x 2 x {geometry.page_tokens} tokens x {geometry.num_kv_heads} KV heads x {geometry.head_dim} x "
            f"{geometry.itemsize_bytes} bytes), memory is {config.memory}, {num_pages} pages"
            + ("" if split is None else f", of which memory_split={split:g} leaves {total} to sequences")
            + f"; give at least {enough * geometry.page_bytes} bytes"
            + (f", or a max_model_len of {total * geometry.page_tokens} at most" if total else ""),
            where="the pool" if split is None else "their share of the pool",
        )
    return longest


def _named(what: str, progress: Callable[[str, int, int], None]) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)
