"""Runs a workload through a world, from the first arrival to the last end. Decides nothing; knows no policy.

The host's moments are those at which it has read a step. What arrived meanwhile is handed over then, as the engine's
inbox does; when the engine has nothing to do, time goes on to the next arrival or the end of the next transfer.
"""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from interleaf.core import Request, RequestFinished, SamplingParams, TokenEvent
from interleaf.sim.runner import ENDS, GOES_ON
from interleaf.sim.workload import BASE, Floats, Workload
from interleaf.sim.world import Counts, World

_SAMPLE_EVERY = 16
"""Steps between two looks at the queue: walking it costs as much as planning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a workload.

    Attributes:
        first_token_s, started_s, ended_s: [requests], seconds since the start.
        counts: totals; `before` is what they were when the warm-up ended.
        warm_up: requests whose arrival belongs to the warm-up.
        warm_at_s: when the first request after them arrived.
        end_s: when the last request ended.
        waited_s: seconds that sequences waited, by reason; from samples of the queue.
        busy_s: seconds of steps.   link_busy_s: of copies.
        peak_kv_pages: the most pages of KV at a time.
        plan_s, host_s: real seconds in the engine's own code, and in all.
    """

    first_token_s: Floats
    started_s: Floats
    ended_s: Floats
    counts: Counts
    before: Counts
    warm_up: int
    warm_at_s: float
    end_s: float
    waited_s: dict[str, float]
    busy_s: float
    link_busy_s: float
    peak_kv_pages: int
    plan_s: float
    host_s: float

    @property
    def measured(self) -> Counts:
        """The counts since the warm-up ended."""
        before = asdict(self.before)
        return Counts(**{key: value - before[key] for key, value in asdict(self.counts).items()})


def simulate(world: World, workload: Workload, *, warm_up: int = 0, max_tokens: int | None = None) -> Outcome:
    """Serve every request.

    Args:
        warm_up: requests at the beginning that figures leave out.
        max_tokens: what requests declare; they end earlier, by an end token that nobody foresees. None: they declare
            the length that they will have, and their ends are planned.
    """
    collects = gc.isenabled()
    gc.disable()  # nothing here is a cycle, and looking for some takes a tenth of the time
    try:
        return _Simulation(world, workload, warm_up, max_tokens).run()
    finally:
        if collects:
            gc.enable()


class _Simulation:
    """One run."""

    def __init__(self, world: World, workload: Workload, warm_up: int, max_tokens: int | None) -> None:
        self._world = world
        self._workload = workload
        self._warm_up = warm_up
        self._requests = _requests(world, workload, max_tokens)
        self._stop_ids = frozenset[int]() if max_tokens is None else frozenset((ENDS,))
        self._arrival_s = [*workload.arrival_s.tolist(), math.inf]
        self._ended_s = np.full(len(workload), np.nan)
        self._before = Counts()
        self._waited_s: dict[str, float] = defaultdict(float)
        self._sampled_at_s = 0.0
        self._next_sample = _SAMPLE_EVERY
        self._num_arrived = 0
        self._num_open = 0
        self._engine_s = 0.0

    def run(self) -> Outcome:
        began = time.perf_counter()
        world, engine, clock = self._world, self._world.engine, self._world.clock
        while self._num_arrived < len(self._workload) or self._num_open:
            if not self._num_open:
                clock.reach(self._arrival_s[self._num_arrived])
            self._arrive()
            self._step()
            if engine.is_stalled and self._num_open:
                self._wait()
            if engine.num_steps >= self._next_sample:
                self._look_at_the_queue()
        while engine.has_work:  # a step whose only row was in excess
            engine.step()
        world.check()
        return Outcome(
            first_token_s=world.runner.first_token_s,
            started_s=world.runner.started_s,
            ended_s=self._ended_s,
            counts=world.counts(),
            before=self._before,
            warm_up=self._warm_up,
            warm_at_s=self._arrival_s[self._warm_up] if self._warm_up else 0.0,
            end_s=float(self._ended_s.max()),
            waited_s=dict(self._waited_s),
            busy_s=world.runner.busy_s,
            link_busy_s=world.link.busy_s,
            peak_kv_pages=world.peak_kv_pages,
            plan_s=self._engine_s - world.runner.host_s,
            host_s=time.perf_counter() - began,
        )

    def _arrive(self) -> None:
        """Hand over what has arrived by now."""
        while self._arrival_s[self._num_arrived] <= self._world.clock.now:
            if self._num_arrived == self._warm_up:
                self._before = self._world.counts()
            self._world.engine.submit(next(self._requests), self._stop_ids, self._num_arrived)
            self._num_arrived += 1
            self._num_open += 1

    def _step(self) -> None:
        entered = time.perf_counter()
        events = self._world.engine.step()
        self._engine_s += time.perf_counter() - entered
        for event in [event for event in events if type(event) is not TokenEvent]:
            assert isinstance(event, RequestFinished), event
            self._ended_s[int(event.request_id)] = self._world.clock.now
            self._num_open -= 1

    def _wait(self) -> None:
        """Nothing can be planned: time goes on to whatever comes next."""
        next_s = min(self._world.next_event_s, self._arrival_s[self._num_arrived])
        assert next_s < math.inf, f"requests wait for what never comes: {self._world.scheduler.waiting_by_reason()}"
        self._world.clock.reach(next_s)

    def _look_at_the_queue(self) -> None:
        scheduler, now_s = self._world.scheduler, self._world.clock.now
        for reason, count in scheduler.waiting_by_reason().items():
            self._waited_s[reason.value] += count * (now_s - self._sampled_at_s)
        self._sampled_at_s = now_s
        self._next_sample = self._world.engine.num_steps + max(_SAMPLE_EVERY, scheduler.num_waiting // 8)


def _requests(world: World, workload: Workload, max_tokens: int | None) -> Iterator[Request]:
    """The workload's requests in order. Every prompt is another, so that no prefix is shared."""

    @cache
    def params(length: int) -> SamplingParams:
        return SamplingParams(max_tokens=length, ignore_eos=True)

    @cache
    def tail(length: int) -> tuple[int, ...]:
        return (GOES_ON,) * length

    rows = zip(
        workload.arrival_s.tolist(), workload.adapter.tolist(), workload.prompt_tokens.tolist(),
        workload.output_tokens.tolist(), strict=True,
    )  # fmt: skip
    for number, (arrival_s, adapter, prompt, output) in enumerate(rows):
        yield Request(
            id=str(number),
            prompt_token_ids=(number + 2, *tail(prompt - 1)),
            params=params(max(output, max_tokens or 0)),
            adapter=None if adapter == BASE else world.uids[adapter],
            arrival_s=arrival_s,
        )
