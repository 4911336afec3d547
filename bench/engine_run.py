"""Runs the requests of one row through an engine, and says how that went. Parses nothing and prints nothing."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine_floor import BYTES_PER_S, ModelCosts, StepCost, step_costs, total_floor_s
from bench.engine_log import EventLog, StepLog
from bench.engine_rows import TraceRequest, random_prompts
from bench.engine_setup import BenchEngine
from bench.sim_record import write_record
from interleaf.core import RequestFinished, SamplingParams, StepPlan, TokenEvent

_WARM_UP_PROMPT_TOKENS = 16
_FULL = 0.95
"""A decode step counts as full with this share of the rows of the run's largest one: sequences that end and start, and
the tail of a run, are left out."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, made before the timer starts."""

    arrival_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None


@dataclass(slots=True)
class Recording:
    """What was noted while a run went on.

    Attributes:
        begin_s: when the first request was due; `time.perf_counter`, as everything here.
        ids: of the requests, in the order of the trace.
        host_s: for every turn of the step loop, the seconds that it did not spend waiting for a step.
        turn_steps: steps launched up to and including each turn.
        cut: the run took too long and was ended.
    """

    begin_s: float
    steps: StepLog
    events: EventLog = field(default_factory=EventLog)
    ids: list[str] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    turn_steps: list[int] = field(default_factory=list)
    cut: bool = False


def make_requests(
    trace: Sequence[TraceRequest], names: Mapping[int, str], vocab_size: int, seed: int
) -> list[BenchRequest]:
    """The requests of a trace: random prompts, greedy, of exactly the lengths that it says.

    Args:
        names: of the adapters, by index; empty: all requests go to the base model.
    """
    prompts = random_prompts([request.prompt_tokens for request in trace], vocab_size, seed)
    return [
        BenchRequest(
            request.arrival_s,
            prompt,
            SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True),
            names[request.adapter] if names and request.adapter is not None else None,
        )
        for request, prompt in zip(trace, prompts, strict=True)
    ]


def warm_up(engine: BenchEngine, requests: Sequence[BenchRequest], num_steps: int) -> None:
    """Run the beginning of a trace, cut short, so that every batch size is met on the way down, and the largest step.

    The first prompts fill two steps, the others are short; sequences end a few at a time over `num_steps` steps.
    """
    config = engine.parts.config
    chosen = requests[: config.max_num_seqs]
    whole = 2 * config.max_batch_tokens
    short: list[BenchRequest] = []
    for position, request in enumerate(chosen):
        prompt = request.prompt if whole > 0 else request.prompt[:_WARM_UP_PROMPT_TOKENS]
        whole -= len(prompt)
        tokens = 2 + position * num_steps // len(chosen)
        room = engine.parts.max_model_len - len(prompt)
        params = SamplingParams(max_tokens=max(1, min(tokens, room)), temperature=0, ignore_eos=True)
        short.append(BenchRequest(0.0, prompt, params, request.adapter))
    drive(engine, short)


def drive(engine: BenchEngine, requests: Sequence[BenchRequest], limit_s: float | None = None) -> Recording:
    """Submit requests when they are due, in real time, and run the engine until all have ended.

    Args:
        limit_s: end the run then, unfinished.

    Raises: EngineDead: a step has failed; its error is the cause.
    """
    client, clock = engine.client, time.perf_counter
    steps = engine.recording.reset()
    gc.collect()
    gc.freeze()  # a full collection would walk over every module's objects in the middle of a step
    recording = Recording(clock(), steps)
    begin, events, ids = recording.begin_s, recording.events, recording.ids
    coming = iter(requests)
    due = next(coming, None)

    def submit_due() -> None:
        nonlocal due
        now = clock()
        while due is not None and due.arrival_s <= now - begin:
            ids.append(client.submit(due.prompt, due.params, due.adapter))
            due = next(coming, None)

    while due is not None or client.has_work:
        submit_due()
        if due is not None:  # an engine that has time waits for whoever comes, as a served one waits for messages
            spare_s = client.spare_s if client.has_work else math.inf
            time.sleep(max(0.0, min(spare_s, begin + due.arrival_s - clock())))
            submit_due()
        if not client.has_work:
            continue
        waited, begun = steps.waited_s, clock()
        told = client.poll()
        end = clock()
        recording.host_s.append(end - begun - (steps.waited_s - waited))
        recording.turn_steps.append(len(steps.plans))
        if told:
            events.note(end, told)
        if limit_s is not None and end - begin > limit_s:
            recording.cut, due = True, None
            for id_ in ids:
                client.abort(id_)
            while client.has_work:
                client.poll()
    gc.unfreeze()
    engine.parts.engine.require_alive()
    return recording


def measure(
    engine: BenchEngine,
    requests: Sequence[BenchRequest],
    costs: ModelCosts,
    limit_s: float | None = None,
    record: Path | None = None,
) -> dict[str, Any]:
    """Run requests whose adapters have just been registered. Returns: the figures of the run, ready for JSON.

    Args: record: where to write the steps and their times, for `python -m interleaf.sim fit`.
    """
    before = engine.counters()
    recording = drive(engine, requests, limit_s)
    after = engine.counters()
    counters = {name: after[name] - before[name] for name in after}
    plans = recording.steps.plans
    used_bytes = engine.images.used_bytes_by_uid()
    costs_of = step_costs(plans, costs, used_bytes, engine.parts.config.max_num_seqs)
    figures = _throughput(recording, requests)
    if record is not None:
        write_record(record, recording.steps, costs_of, costs.kv_elems * costs.itemsize_bytes)
    floor_s = total_floor_s(costs_of)
    open_loop = requests[-1].arrival_s > 0
    # With arrivals in between the engine idles at times, and the floor says nothing about the whole.
    figures["floor_s"] = floor_s
    figures["floor_ratio"] = None if open_loop or recording.cut else figures["seconds"] / floor_s
    figures |= _adapters(plans, counters) | _steps(recording, costs_of, counters)
    held = engine.parts.allocator.num_pages - engine.num_pool_pages
    figures |= {
        "distinct_adapters": len({request.adapter for request in requests if request.adapter is not None}),
        "peak_adapter_pages": recording.steps.peak_adapter_pages,
        "peak_kv_pages": recording.steps.peak_kv_pages - held,
        "pool_pages": engine.num_pool_pages,
        "page_bytes": engine.parts.geometry.page_bytes,
        "preemptions": int(counters["num_preemptions"]),
    }
    return figures


def percentiles(values: Sequence[float] | np.ndarray[Any, Any], scale: float = 1.0) -> dict[str, float] | None:
    """The 50th, 90th and 99th, and the greatest; None where there are no values."""
    if len(values) == 0:
        return None
    p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)) * scale
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(most)}


def _throughput(recording: Recording, requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """What the callers saw: tokens, and when they came."""
    events = recording.events
    place = {id_: i for i, id_ in enumerate(recording.ids)}
    whose = np.array([place[id_] for id_ in events.ids], dtype=np.int64)
    when = np.repeat(np.array(events.when_s), events.counts) - recording.begin_s
    is_token = np.array([kind is TokenEvent for kind in events.types], dtype=bool)
    num_finished = sum(kind is RequestFinished for kind in events.types)
    tokens, token_s = whose[is_token], when[is_token]
    num_tokens = np.bincount(tokens, minlength=len(requests))
    wanted = np.array([request.params.max_tokens for request in requests])
    wrong = int((num_tokens != wanted).sum())
    seconds = float(when[-1]) if len(when) else 0.0
    problems = []
    if recording.cut:
        problems.append(f"ended after {seconds:.0f} s with {num_finished} of {len(requests)} requests finished")
    elif wrong or num_finished != len(requests):
        problems.append(f"{wrong} requests have not yielded their length, {len(requests) - num_finished} have failed")

    arrival = np.array([request.arrival_s for request in requests])
    order = np.argsort(tokens, kind="stable")  # tokens of a request stay in order of time
    by_request, times = tokens[order], token_s[order]
    first = np.flatnonzero(np.diff(by_request, prepend=-1))
    last = np.append(first[1:], len(by_request)) - 1 if len(first) else first
    same = np.diff(by_request) == 0
    started = by_request[first]
    complete = num_tokens[started] == wanted[started]
    return {
        "seconds": seconds,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": len(tokens),
        "output_tokens_per_s": len(tokens) / seconds if seconds else 0.0,
        "requests_per_s": num_finished / seconds if seconds else 0.0,
        "ttft_s": percentiles(times[first] - arrival[started]),
        "latency_s": percentiles((times[last] - arrival[started])[complete]),
        "itl_ms": percentiles(np.diff(times)[same], 1e3),
        "problems": problems,
    }


def _adapters(plans: Sequence[StepPlan], counters: Mapping[str, float]) -> dict[str, Any]:
    """How adapters came and went. A reload: a load of an adapter that had been in the pool before, in this run."""
    loads = Counter(load.uid for plan in plans for load in plan.load)
    asked = counters["hits"] + counters["misses"] + counters["late_prefetches"]
    return {
        "hit_rate": counters["hits"] / asked if asked else None,
        "late_prefetch_rate": counters["late_prefetches"] / asked if asked else None,
        "loads": loads.total(),
        "reloads": loads.total() - len(loads),
    }


def _steps(recording: Recording, costs: Sequence[StepCost], counters: Mapping[str, float]) -> dict[str, Any]:
    """What steps took: the host's part of them, and the device's against the floor."""
    steps = recording.steps
    launched = np.diff(np.array(recording.turn_steps), prepend=0) > 0
    host_s = np.array(recording.host_s)
    decode_only = np.array([not plan.chunks and bool(plan.decode) for plan in steps.plans], dtype=bool)
    mixed = np.array([bool(plan.chunks) for plan in steps.plans], dtype=bool)
    num_decode = np.array([len(plan.decode) for plan in steps.plans])
    full = decode_only & (num_decode >= _FULL * num_decode.max(initial=0, where=decode_only))
    turn_of_step = np.flatnonzero(launched)
    num_steps = int((decode_only | mixed).sum())
    # The time of a step: from the end of the one before, or its own launch if that came later, to its own end.
    done, begun = np.array(steps.done_s), np.array(steps.launched_s)
    usable = len(done) == len(begun) == len(turn_of_step) == len(costs) > 0
    took = done - np.maximum(begun, np.append(recording.begin_s, done[:-1])) if usable else done

    def of(which: np.ndarray[Any, Any]) -> dict[str, Any] | None:
        if not usable or not which.any():
            return None
        chosen = [cost for cost, wanted in zip(costs, which, strict=True) if wanted]
        floor_s = total_floor_s(chosen)
        return {
            "steps": len(chosen),
            "seconds": float(took[which].sum()),
            "ms": float(took[which].mean() * 1e3),
            "floor_ms": floor_s / len(chosen) * 1e3,
            "floor_ratio": float(took[which].sum()) / floor_s,
            "host_ms": float(host_s[turn_of_step[which]].mean() * 1e3),
            "rows": float(np.mean([cost.rows for cost in chosen])),
            "adapters": float(np.mean([cost.adapters for cost in chosen])),
        }

    host_ms = percentiles(host_s[launched], 1e3)
    return {
        "steps": num_steps,
        "host_ms_per_step": float(host_s.sum() / max(1, len(steps.plans)) * 1e3),
        "host_ms": host_ms,
        "starved_share": steps.num_starved / max(1, len(steps.plans)),
        "graph_share": counters["num_graph_steps"] / num_steps if num_steps else None,
        "captures": int(counters["num_captures"]),
        "stand_ins": int(counters["num_stand_ins"]),
        "capture_s": counters["capture_seconds"],
        "launch_ms_per_step": counters["launch_seconds"] / max(1, len(steps.plans)) * 1e3,
        "decode": of(decode_only),
        "full_decode": of(full),
        "mixed": of(mixed),
        "floor_bytes_s": {
            "weights": sum(cost.weight_bytes for cost in costs) / BYTES_PER_S,
            "kv": sum(cost.kv_bytes for cost in costs) / BYTES_PER_S,
            "adapters": sum(cost.adapter_bytes for cost in costs) / BYTES_PER_S,
        },
    }
