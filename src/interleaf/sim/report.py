"""Figures of an outcome, as numbers and as text. Knows what is counted; runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from interleaf.sim.simulate import Outcome
from interleaf.sim.workload import BASE, Workload


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run comes to, since its warm-up. Everything but the last two is simulated time and repeats exactly.

    Attributes:
        output_tokens_s: output tokens over the time from the end of the warm-up to the last request's end.
        ttft_*: arrival to the end of the step that sampled the first token.
        queue_wait_s: arrival to the start of the first step, in the mean.
        waited_s: seconds that a request waited in the mean, by reason, warm-up included.
        hit_rate: of requests that name an adapter: it was in the pool when the request was first considered. None: no
            request names one.
        reloads: loads of adapters that had been loaded before.
        device_busy, link_busy: shares of the whole time during which a step ran, and a copy did.
        plan_us: real microseconds of the engine's code a step: plan, commit and what lies between.
        host_s: real seconds of everything.
    """

    requests: int
    adapters_asked_for: int
    output_tokens_s: float
    requests_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    latency_mean_s: float
    queue_wait_s: float
    waited_s: dict[str, float]
    hit_rate: float | None
    loads: int
    reloads: int
    prefetches: int
    late_prefetches: int
    prefetched_unused: int
    evictions: int
    preemptions: int
    resumed_kept: int
    resumed_swapped: int
    resumed_recomputed: int
    recomputed_tokens: int
    swap_out_pages: int
    swap_in_pages: int
    disk_reads: int
    steps: int
    rows_per_step: float
    device_busy: float
    link_busy: float
    peak_kv_pages: int
    plan_us: float
    host_s: float


def figures(outcome: Outcome, workload: Workload) -> Figures:
    """What a run comes to. Requests of the warm-up count for nothing but `waited_s`, `peak_kv_pages` and real time."""
    seen = slice(outcome.warm_up, None)
    counts = outcome.measured
    arrival_s = workload.arrival_s[seen]
    ttft_s = outcome.first_token_s[seen] - arrival_s
    p50_s, p99_s = np.percentile(ttft_s, (50, 99))
    duration_s = outcome.end_s - outcome.warm_at_s
    lookups = counts.hits + counts.misses + counts.late_prefetches
    return Figures(
        requests=len(arrival_s),
        adapters_asked_for=int(np.unique(workload.adapter[seen][workload.adapter[seen] != BASE]).size),
        output_tokens_s=counts.output_tokens / duration_s,
        requests_s=len(arrival_s) / duration_s,
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=float(p50_s),
        ttft_p99_s=float(p99_s),
        latency_mean_s=float((outcome.ended_s[seen] - arrival_s).mean()),
        queue_wait_s=float((outcome.started_s[seen] - arrival_s).mean()),
        waited_s={reason: seconds / len(workload) for reason, seconds in sorted(outcome.waited_s.items())},
        hit_rate=counts.hits / lookups if lookups else None,
        loads=counts.loads,
        reloads=counts.reloads,
        prefetches=counts.prefetches,
        late_prefetches=counts.late_prefetches,
        prefetched_unused=counts.prefetched_unused,
        evictions=counts.evictions,
        preemptions=counts.preemptions,
        resumed_kept=counts.resumed_kept,
        resumed_swapped=counts.resumed_swapped,
        resumed_recomputed=counts.resumed_recomputed,
        recomputed_tokens=counts.recomputed_tokens,
        swap_out_pages=counts.swap_out_pages,
        swap_in_pages=counts.swap_in_pages,
        disk_reads=counts.disk_reads,
        steps=counts.steps,
        rows_per_step=counts.computed_tokens / counts.steps,
        device_busy=outcome.busy_s / outcome.end_s,
        link_busy=outcome.link_busy_s / outcome.end_s,
        peak_kv_pages=outcome.peak_kv_pages,
        plan_us=outcome.plan_s / outcome.counts.steps * 1e6,
        host_s=outcome.host_s,
    )


def as_text(of: Figures) -> str:
    """One figure a line."""
    ms = 1e3
    lines = [
        ("requests", f"{of.requests:,} ({of.requests_s:.1f} a second) for {of.adapters_asked_for:,} adapters"),
        ("output", f"{of.output_tokens_s:,.0f} tokens/s"),
        ("TTFT", f"mean {of.ttft_mean_s * ms:.1f} ms, p50 {of.ttft_p50_s * ms:.1f}, p99 {of.ttft_p99_s * ms:.1f}"),
        ("latency", f"mean {of.latency_mean_s * ms:,.0f} ms"),
        ("queue wait", f"mean {of.queue_wait_s * ms:.1f} ms"),
        *((f"  {reason}", f"{seconds * ms:.1f} ms a request") for reason, seconds in of.waited_s.items()),
        ("hit rate", "-" if of.hit_rate is None else f"{of.hit_rate:.1%}"),
        ("loads", f"{of.loads:,}, of them {of.reloads:,} again; {of.evictions:,} evictions"),
        ("prefetched", f"{of.prefetches:,}; {of.late_prefetches:,} too late, {of.prefetched_unused:,} unused"),
        ("disk reads", f"{of.disk_reads:,}"),
        (
            "preemptions",
            f"{of.preemptions:,}; {of.resumed_kept:,} kept, {of.resumed_swapped:,} swapped, {of.resumed_recomputed:,} "
            f"recomputed; {of.recomputed_tokens:,} tokens again, {of.swap_out_pages:,} pages out and "
            f"{of.swap_in_pages:,} in",
        ),
        ("steps", f"{of.steps:,} of {of.rows_per_step:.0f} rows"),
        ("busy", f"device {of.device_busy:.0%}, link {of.link_busy:.0%}"),
        ("KV", f"{of.peak_kv_pages:,} pages at the peak"),
        ("plan", f"{of.plan_us:.0f} us a step of real time; the simulation took {of.host_s:.1f} s"),
    ]  # fmt: skip
    return "\n".join(f"{name:<34} {value}" for name, value in lines)
