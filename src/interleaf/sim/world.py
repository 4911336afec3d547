"""Puts the engine's own scheduler and step loop around simulated parts. The one file that names their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from interleaf.adapters.residency import Residency
from interleaf.core import AdapterUid
from interleaf.engine.engine import Engine
from interleaf.errors import ConfigError, PoolTooSmall
from interleaf.memory.allocator import OwnerKind
from interleaf.memory.eviction import CostAware, EvictionPolicy, Lru, PageCosts
from interleaf.memory.prefix import PrefixCache
from interleaf.memory.regions import Regions, pages_for_sequences
from interleaf.memory.swap import SwapSpace
from interleaf.scheduler.admission import Admission, Conservative, Estimated, Optimistic
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.policy import Fcfs
from interleaf.scheduler.preemption import LatestArrival
from interleaf.scheduler.scheduler import Scheduler
from interleaf.sim.cost import CostModel, StepWork, prefill_rate, roofline
from interleaf.sim.hardware import Gpu
from interleaf.sim.host import SimHost
from interleaf.sim.link import Clock, Link
from interleaf.sim.runner import SimRunner
from interleaf.sim.shapes import AdapterShape, ModelShape
from interleaf.sim.workload import Workload

_EVICTION = ("lru", "cost")
_ADMISSION: dict[str, Callable[[], Admission]] = {
    "optimistic": Optimistic,
    "estimated": Estimated,
    "conservative": Conservative,
}

MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights and pool; the rest is activations, graphs and the libraries' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine's settings that a simulation may vary.

    Attributes:
        pool_pages: None: what the GPU's memory leaves beside the weights.
        memory_split: share of the pages that only adapters may use; None: they share all with KV, as the engine does.
        max_num_seqs, max_batch_tokens: seats, and rows of a step at most.
        refill_seats: seats that must be free before prompts are computed beside decoding; None: a sixteenth of all.
        overlap: plan step k+1 while step k runs.
        eviction: which idle adapter leaves first: the least recently used ("lru"), or what is worth least ("cost").
        prefetch_loads: adapters on their way at most for sequences that have no seat to take yet; 0: no look-ahead.
        max_loads: adapters on their way at most.
        admission: what must fit before a sequence starts: its known tokens ("optimistic"), the estimated peak
            ("estimated"), or all that it may ever need ("conservative").
        prefix_cache: whether sequences that begin alike share pages.
        swap_memory_bytes: budget of host memory for what preempted sequences have computed; 0: none.
        always_swaps: whatever is estimated to be cheaper. For studies: the engine has no such setting.
        host_memory_bytes: budget of host memory for adapters; None: all are in it from the start.
        disk_bytes_s: rate at which those beyond it are read.
    """

    pool_pages: int | None = None
    memory_split: float | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    refill_seats: int | None = None
    overlap: bool = True
    host_memory_bytes: float | None = None
    disk_bytes_s: float = 2e9
    eviction: str = "cost"
    prefetch_loads: int = 8
    max_loads: int = 32
    admission: str = "estimated"
    prefix_cache: bool = False
    swap_memory_bytes: int = 0
    always_swaps: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_batch_tokens:
            raise ConfigError(
                f"max_num_seqs must be from 1 to max_batch_tokens={self.max_batch_tokens}, got {self.max_num_seqs}"
            )
        if self.refill_seats is not None and not 1 <= self.refill_seats <= self.max_num_seqs:
            raise ConfigError(
                f"refill_seats must be from 1 to max_num_seqs={self.max_num_seqs}, got {self.refill_seats}"
            )
        for name, allowed in (("eviction", _EVICTION), ("admission", tuple(_ADMISSION))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not 0 <= self.prefetch_loads <= self.max_loads or not self.max_loads:
            raise ConfigError(
                f"prefetch_loads must be from 0 to max_loads={self.max_loads}, which is at least 1; got "
                f"{self.prefetch_loads}"
            )
        if self.memory_split is not None and not 0.0 < self.memory_split < 1.0:
            raise ConfigError(f"memory_split must be a share between 0 and 1, got {self.memory_split}")
        if self.swap_memory_bytes < 0:
            raise ConfigError(f"swap_memory_bytes must not be negative, got {self.swap_memory_bytes}")
        if self.disk_bytes_s <= 0:
            raise ConfigError(f"disk_bytes_s must be positive, got {self.disk_bytes_s}")


@dataclass(frozen=True, slots=True)
class Counts:
    """Running totals of an engine, as in `stats.EngineStats`. Reloads are loads of what had been loaded before."""

    hits: int = 0
    misses: int = 0
    late_prefetches: int = 0
    loads: int = 0
    reloads: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetched_unused: int = 0
    preemptions: int = 0
    resumed_kept: int = 0
    resumed_swapped: int = 0
    resumed_recomputed: int = 0
    recomputed_tokens: int = 0
    swap_out_pages: int = 0
    swap_in_pages: int = 0
    disk_reads: int = 0
    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class World:
    """One engine in a simulated machine."""

    clock: Clock
    link: Link
    host: SimHost
    runner: SimRunner
    allocator: Regions
    residency: Residency
    scheduler: Scheduler
    engine: Engine
    uids: list[AdapterUid] = field(repr=False)

    def counts(self) -> Counts:
        of, resumed, swapped = self.residency.counts, self.scheduler.resumed, self.scheduler.swap.counts
        return Counts(
            hits=of.hits,
            misses=of.misses,
            loads=of.loads,
            reloads=self.runner.reloads,
            late_prefetches=of.late_prefetches,
            evictions=of.evictions,
            prefetches=of.prefetches,
            prefetched_unused=of.prefetched_unused,
            preemptions=self.scheduler.num_preemptions,
            resumed_kept=resumed.kept,
            resumed_swapped=resumed.swapped,
            resumed_recomputed=resumed.recomputed,
            recomputed_tokens=resumed.recomputed_tokens,
            swap_out_pages=swapped.out_pages,
            swap_in_pages=swapped.in_pages,
            disk_reads=self.host.disk_reads,
            steps=self.engine.num_steps,
            computed_tokens=self.engine.num_computed_tokens,
            output_tokens=self.engine.num_output_tokens,
        )

    @property
    def peak_kv_pages(self) -> int:
        return self.allocator.num_peak_pages(OwnerKind.KV)

    @property
    def next_event_s(self) -> float:
        """When something ends that the engine may be waiting for beside its own steps; infinity: nothing will."""
        return min(self.runner.next_load_end_s, self.host.next_arrival_s)

    def check(self) -> None:
        """Assert what must hold when nothing is open: pages and slots balance and nobody holds one for a request."""
        self.allocator.check()
        self.scheduler.swap.check()
        assert not self.scheduler.swap.num_used_slots, "a sequence that has ended holds slots"
        assert self.allocator.num_used_pages(OwnerKind.KV) == 0, "a sequence that has ended holds pages"
        assert not self.scheduler.num_running, "a seat is taken"


def build_world(
    workload: Workload,
    *,
    model: ModelShape,
    gpu: Gpu,
    adapters: list[AdapterShape],
    settings: Settings,
    cost: CostModel | None = None,
    record: Callable[[StepWork, float], None] | None = None,
) -> World:
    """Everything up to the first request.

    Args:
        adapters: the shape of each adapter of the workload.
        cost: of steps; None: the GPU's roofline.
        record: see `SimRunner`.
    Raises: ConfigError: the weights do not fit. PoolTooSmall: the largest request does not fit.
    """
    assert len(adapters) == workload.num_adapters, f"{len(adapters)} shapes of {workload.num_adapters} adapters"
    geometry = model.geometry
    num_pages = settings.pool_pages
    if num_pages is None:
        left = gpu.memory_bytes * MEMORY_SHARE - model.weight_bytes
        if left <= 0:
            raise ConfigError(
                f"{gpu.name} has {gpu.memory_bytes / 1e9:g} GB and the weights take {model.weight_bytes / 1e9:.0f}"
            )
        num_pages = geometry.pages_for_bytes(int(left))
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    largest = max((shape.pages for shape in adapters), default=0)
    needed = geometry.pages_for_tokens(longest)
    if settings.memory_split is None:
        if needed + largest > num_pages:
            raise PoolTooSmall(
                f"a sequence of {longest} tokens", needed + largest, num_pages,
                f"{largest} of them are the largest adapter's",
            )  # fmt: skip
    else:
        total = pages_for_sequences(num_pages, settings.memory_split)
        how = f"memory_split={settings.memory_split:g} of {num_pages} pages"
        if needed > total:
            raise PoolTooSmall(f"a sequence of {longest} tokens", needed, total, how, where="its share of the pool")
        if largest > num_pages - total:
            raise PoolTooSmall("the largest adapter", largest, num_pages - total, how, where="its share of the pool")

    clock = Clock()
    link = Link(gpu.link_bytes_s)
    uids = [AdapterUid(f"adapter-{index}") for index in range(workload.num_adapters)]
    host = SimHost(
        clock, dict(zip(uids, adapters, strict=True)), geometry.page_bytes, settings.host_memory_bytes,
        Link(settings.disk_bytes_s),
    )  # fmt: skip
    allocator = Regions.of(num_pages, settings.memory_split)
    steps = cost or roofline(gpu, model)
    costs = PageCosts(
        adapter_s=geometry.page_bytes / gpu.link_bytes_s,
        prefix_s=geometry.page_tokens / prefill_rate(steps, settings.max_batch_tokens),
    )
    policy: EvictionPolicy = Lru(costs) if settings.eviction == "lru" else CostAware(costs)
    residency = Residency(allocator.adapters, policy)
    region = allocator.for_sequences(policy)
    idle = (region or residency).reclaimer
    swap = SwapSpace(
        geometry.pages_for_bytes(settings.swap_memory_bytes),
        geometry.page_tokens,
        lambda: replace(costs, adapter_s=0.0) if settings.always_swaps else policy.costs,
    )
    scheduler = Scheduler(
        geometry=geometry,
        allocator=allocator.sequences,
        residency=residency,
        images=host,
        policy=Fcfs(),
        admission=_ADMISSION[settings.admission](),
        preemption=LatestArrival(),
        max_batch_tokens=settings.max_batch_tokens,
        max_num_seqs=settings.max_num_seqs,
        refill_seats=settings.refill_seats or max(1, settings.max_num_seqs // 16),
        loads=LoadLimits(max_loads=settings.max_loads, prefetch_loads=settings.prefetch_loads),
        prefixes=PrefixCache(allocator.sequences, idle, geometry.page_tokens) if settings.prefix_cache else None,
        swap=swap,
        region=region,
    )
    runner = SimRunner(
        clock=clock,
        cost=steps,
        link=link,
        workload=workload,
        index_of={uid: index for index, uid in enumerate(uids)},
        adapter_bytes=[shape.num_bytes for shape in adapters],
        image_bytes=host.image_bytes,
        page_bytes=geometry.page_bytes,
        link_out=Link(gpu.link_bytes_s),
        num_seats=settings.max_num_seqs,
        record=record,
    )
    engine = Engine(scheduler, runner, lookahead=1 if settings.overlap else 0, now=clock)
    return World(clock, link, host, runner, allocator, residency, scheduler, engine, uids)
