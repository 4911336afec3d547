"""A snapshot of the engine: what metrics, dashboard and router read. Plain numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field

LOAD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Upper bounds of the classes in which loads are counted by the time they took."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages by what they hold; free + kv + prefix + adapter = total.

    Attributes:
        kv_pages: of one sequence each.
        prefix_pages: of the prefix cache: shared by sequences that run, or kept for those to come.
        peak_kv_pages, peak_adapter_pages, peak_prefix_pages: the most at any one time, each by itself.
        page_bytes: bytes of one page, over all layers.
    """

    total_pages: int
    free_pages: int
    kv_pages: int
    adapter_pages: int
    peak_kv_pages: int
    peak_adapter_pages: int
    page_bytes: int
    prefix_pages: int = 0
    peak_prefix_pages: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its running totals since it started.

    Attributes:
        resident_adapters: adapters in the pool.
        registered_adapters: adapters that requests can name.
        waiting_by_reason: waiting sequences by what they wait for.
        adapter_hits, adapter_misses: requests whose adapter was, or was not, in the pool when first considered.
        adapter_late_prefetches: requests whose adapter was on its way then, sent for ahead of need.
        adapter_prefetches: loads begun ahead of need.
        adapter_prefetches_unused: of those, the adapters that left without having been used.
        steps: plans launched.   computed_tokens: rows of all steps.   output_tokens: tokens committed.
        preemptions: sequences that lost their seat.
        resumed_kept, resumed_swapped, resumed_recomputed: of those, that have a seat again: all that they had computed
            was still in the pool; pages of it came back from host memory; or neither, some had to be computed again.
        recomputed_tokens: of all of them, tokens that had to be.
        swap_out_pages, swap_in_pages: copied to host memory, and back.
        swap_slots, swap_used_slots: pages that host memory has room for, and those that are there now.
        prefix_hit_tokens, prefix_miss_tokens: known tokens of sequences that started, by whether their KV was found in
            the prefix cache or had to be computed; both 0 without one.
        load_counts: loads by the first of LOAD_BOUNDS_S that is not below the time from sending for the adapter, to the
            disk if it must be, until it was in the pool; one more for those beyond.   load_s: the sum of the times.
        adapter_pages: pages of every adapter in the pool, by one of its names.
        adapter_disk_bytes, adapter_disk_files: what the folder of the disk tier holds; all of it 0 without one.
        adapter_disk_hits, adapter_disk_writes: adapters read back from there, and written to it.
        adapter_disk_errors: files there that were damaged, or could not be read or written.
        copy_rate, prefill_rate: bytes copied to the pool and tokens of prompts computed a second, as measured at start
            or as set: what eviction and preemption reckon with.
    """

    pool: PoolStats
    resident_adapters: int
    registered_adapters: int
    running_sequences: int
    waiting_sequences: int
    adapter_hits: int
    adapter_misses: int
    adapter_loads: int
    adapter_evictions: int
    adapter_failed_loads: int
    preemptions: int
    steps: int
    computed_tokens: int
    output_tokens: int
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    adapter_late_prefetches: int = 0
    adapter_prefetches: int = 0
    adapter_prefetches_unused: int = 0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    load_counts: tuple[int, ...] = ()
    load_s: float = 0.0
    adapter_pages: dict[str, int] = field(default_factory=dict)
    resumed_kept: int = 0
    resumed_swapped: int = 0
    resumed_recomputed: int = 0
    recomputed_tokens: int = 0
    swap_out_pages: int = 0
    swap_in_pages: int = 0
    swap_slots: int = 0
    swap_used_slots: int = 0
    adapter_disk_bytes: int = 0
    adapter_disk_files: int = 0
    adapter_disk_hits: int = 0
    adapter_disk_writes: int = 0
    adapter_disk_errors: int = 0
    copy_rate: float = 0.0
    prefill_rate: float = 0.0
