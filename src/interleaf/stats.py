"""A snapshot of the engine: what metrics, dashboard and router read. Plain numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages by what they hold; free + kv + adapter = total.

    Attributes:
        peak_kv_pages, peak_adapter_pages: the most at any one time, each by itself.
        page_bytes: bytes of one page, over all layers.
    """

    total_pages: int
    free_pages: int
    kv_pages: int
    adapter_pages: int
    peak_kv_pages: int
    peak_adapter_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment, and its running totals since it started.

    Attributes:
        resident_adapters: adapters in the pool.
        registered_adapters: adapters that requests can name.
        waiting_by_reason: waiting sequences by what they wait for.
        adapter_hits, adapter_misses: requests whose adapter was, or was not, in the pool when first considered.
        steps: plans launched.   computed_tokens: rows of all steps.   output_tokens: tokens committed.
        preemptions: sequences that lost their seat and were computed again.
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
