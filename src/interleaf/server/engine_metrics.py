"""What the engine has counted, as families of `/metrics`. Asked for at every scrape, kept nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from interleaf.scheduler.sequence import WaitReason
from interleaf.server.families import PREFIX, Families
from interleaf.server.histogram import Histogram
from interleaf.server.labels import AdapterLabels
from interleaf.stats import LOAD_BOUNDS_S, EngineStats


def engine_families(make: Families, stats: EngineStats, adapters: AdapterLabels) -> Iterator[Metric]:
    """Everything in `stats`.

    Args:
        adapters: those with labels of their own.
    """
    pool = stats.pool
    yield make.gauge("num_requests_running", "Sequences that run.", {"": stats.running_sequences})
    yield make.gauge("num_requests_waiting", "Sequences that wait.", {"": stats.waiting_sequences})
    waiting = {reason.value: 0 for reason in WaitReason} | stats.waiting_by_reason
    yield make.gauge("num_requests_waiting_by_reason", "Waiting sequences by what for.", waiting, "reason")
    pages = {"kv": pool.kv_pages, "prefix": pool.prefix_pages, "adapter": pool.adapter_pages}
    pages["free"] = pool.free_pages
    yield make.gauge("pool_pages", "Pages of the pool by what they hold.", pages, "owner")
    peaks = {"kv": pool.peak_kv_pages, "prefix": pool.peak_prefix_pages, "adapter": pool.peak_adapter_pages}
    yield make.gauge("pool_peak_pages", "The most pages at any one time, each by itself.", peaks, "owner")
    slots = {"used": stats.swap_used_slots, "free": stats.swap_slots - stats.swap_used_slots}
    yield make.gauge("swap_pages", "Room in host memory for pages of preempted sequences.", slots, "state")
    yield make.gauge("pool_page_bytes", "Bytes of a page.", {"": pool.page_bytes})
    usage = 1 - pool.free_pages / pool.total_pages if pool.total_pages else 0.0
    yield make.gauge("pool_usage_perc", "Share of the pool that is in use, 0 to 1.", {"": usage})
    yield make.gauge("adapters_registered", "Adapters that can be named.", {"": stats.registered_adapters})
    yield make.gauge("adapters_resident", "Adapters in the pool.", {"": stats.resident_adapters})
    resident = adapters.by_label(stats.adapter_pages)
    yield make.gauge("adapter_resident_pages", "Pages of an adapter in the pool.", resident, "adapter")
    yield make.gauge("copy_bytes_per_second", "Rate of copies to the pool, as of the start.", {"": stats.copy_rate})
    yield make.gauge("prefill_tokens_per_second", "Rate of prompts, as of the start.", {"": stats.prefill_rate})
    yield make.gauge("adapter_disk_bytes", "What the disk tier's folder holds.", {"": stats.adapter_disk_bytes})
    yield make.gauge("adapter_disk_files", "Adapters in it.", {"": stats.adapter_disk_files})
    if stats.load_counts:
        loads = Histogram(LOAD_BOUNDS_S)
        loads.add((list(stats.load_counts), stats.load_s))
        text = "From sending for an adapter, to the disk if it must be, until it is in the pool."
        yield loads.family(PREFIX + "adapter_load_seconds", text, make.model)
    resumed = {"kept": stats.resumed_kept, "swapped": stats.resumed_swapped, "recomputed": stats.resumed_recomputed}
    text = "Preempted sequences with a seat again, by how they came by what they had computed."
    yield make.counter("preempted_resumed", text, resumed, "how")
    copied = {"out": stats.swap_out_pages, "in": stats.swap_in_pages}
    yield make.counter("swapped_pages", "Pages copied to host memory, and back.", copied, "direction")
    queried = stats.prefix_hit_tokens + stats.prefix_miss_tokens
    for name, text, value in (
        ("num_preemptions", "Sequences that lost their seat.", stats.preemptions),
        ("recomputed_tokens", "Of preempted sequences, that had to be computed again.", stats.recomputed_tokens),
        ("adapter_hits", "Requests whose adapter was in the pool when first considered.", stats.adapter_hits),
        ("adapter_misses", "Requests whose adapter was not.", stats.adapter_misses),
        (
            "adapter_late_prefetches",
            "Requests whose adapter was on its way, ahead of need.",
            stats.adapter_late_prefetches,
        ),
        ("adapter_prefetches", "Loads begun ahead of need.", stats.adapter_prefetches),
        ("adapter_prefetches_unused", "Of those, never used in the pool.", stats.adapter_prefetches_unused),
        ("prefix_cache_queries", "Known tokens of sequences that started, with a prefix cache.", queried),
        ("prefix_cache_hits", "Of those, found in the cache.", stats.prefix_hit_tokens),
        ("adapter_loads", "Adapters copied into the pool.", stats.adapter_loads),
        ("adapter_evictions", "Adapters dropped from the pool.", stats.adapter_evictions),
        ("adapter_failed_loads", "Adapters that could not be brought back.", stats.adapter_failed_loads),
        ("adapter_disk_hits", "Adapters read back from the disk tier.", stats.adapter_disk_hits),
        ("adapter_disk_writes", "Adapters written to the disk tier.", stats.adapter_disk_writes),
        ("adapter_disk_errors", "Files there that were damaged or refused.", stats.adapter_disk_errors),
        ("engine_steps", "Steps launched.", stats.steps),
        ("engine_computed_tokens", "Rows of all steps.", stats.computed_tokens),
    ):
        yield make.counter(name, text, {"": value})
