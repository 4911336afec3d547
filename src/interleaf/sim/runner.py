"""Executes plans in no time and says how much they would have taken. Knows seats and sizes, never a tensor or a token.

One stream computes: a step begins when the one before has ended. Copies travel on a link beside it, in order. A copy
begins no sooner than its step: the pages may have been somebody else's until the step before has ended.

    host      |plan k+1|          |plan k+2|
    compute   |---- step k ----||--- step k+1 ---|
    link                        |copy of k+1|         -> usable by plan k+3, which is made when step k+1 has ended
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from interleaf.core import AdapterLoad, AdapterUid, StepPlan, StepResult
from interleaf.sim.cost import CostModel, StepWork
from interleaf.sim.link import Clock, Link
from interleaf.sim.workload import BASE, Ints, Workload

GOES_ON, ENDS = 1, 0
"""The two tokens that a simulated model knows."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """One copy, and when it ends."""

    uid: AdapterUid
    moment_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way; reading it waits for its end."""

    clock: Clock
    end_s: float
    outcome: StepResult

    def result(self) -> StepResult:
        self.clock.reach(self.end_s)
        return self.outcome


class SimRunner:
    """An engine's runner (`engine.engine.Runner`) with a cost model for a device.

    A sequence's seed is its request's number in the workload; so a plan says whom it serves.

    Args:
        adapter_bytes: [adapters], weights that a step reads.
        image_bytes: of an adapter's copy.
        record: called with the work and the seconds of every step that has rows.
    Attributes:
        first_token_s, started_s: [requests], when a request's first token was there, and when it first got a seat
            (the start of the step in which it did); NaN before.
        host_s: real time spent in here.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        cost: CostModel,
        link: Link,
        workload: Workload,
        index_of: dict[AdapterUid, int],
        adapter_bytes: Ints,
        image_bytes: Callable[[AdapterUid], int],
        num_seats: int,
        record: Callable[[StepWork, float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._link = link
        self._index_of = index_of
        self._image_bytes = image_bytes
        self._record = record
        self._output_tokens = workload.output_tokens
        # One more entry, of nothing: BASE, which is -1, finds it. Sums of such whole numbers are exact in floats.
        self._adapter_bytes = np.append(adapter_bytes, 0).astype(np.float64)
        self._in_step = np.zeros(len(self._adapter_bytes))

        self._request = np.zeros(num_seats, dtype=np.int64)
        self._adapter = np.full(num_seats, BASE, dtype=np.int64)
        self._kv_tokens = np.zeros(num_seats, dtype=np.int64)
        self._left = np.zeros(num_seats, dtype=np.int64)
        self._decode: tuple[tuple[int, ...], Ints] = (), np.zeros(0, dtype=np.int64)

        self._busy_until_s = 0.0
        self._loads: deque[LoadEnd] = deque()
        self._loaded: set[AdapterUid] = set()
        self._steady = StepResult(())
        self.first_token_s = np.full(len(workload), np.nan)
        self.started_s = np.full(len(workload), np.nan)
        self.reloads = 0
        self.busy_s = 0.0
        self.host_s = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        entered = time.perf_counter()
        start_s = max(self._busy_until_s, self._clock.now)
        for load in plan.load:
            self._copy(load, start_s)
        for start in plan.start:
            seat, request = start.seat, start.seed
            self._request[seat] = request
            self._adapter[seat] = BASE if start.adapter is None else self._index_of[start.adapter]
            self._left[seat] = self._output_tokens[request] - (len(start.token_ids) - start.prompt_tokens)
            if np.isnan(self.started_s[request]):
                self.started_s[request] = start_s
        work, sampled = self._work(plan)
        duration_s = self._cost.step_s(work)
        if self._record is not None and work.rows:
            self._record(work, duration_s)
        self.busy_s += duration_s
        self._busy_until_s = start_s + duration_s
        for chunk in plan.chunks:
            if chunk.samples and np.isnan(self.first_token_s[self._request[chunk.seat]]):
                self.first_token_s[self._request[chunk.seat]] = self._busy_until_s
        launched = Launched(self._clock, self._busy_until_s, self._sample(sampled))
        self.host_s += time.perf_counter() - entered
        return launched

    def poll_loads(self) -> list[LoadEnd]:
        ended = []
        while self._loads and self._loads[0].moment_s <= self._clock.now:
            ended.append(self._loads.popleft())
        return ended

    def wait_for_load(self) -> bool:
        """No wait here: whoever drives the engine moves the clock, to the end of a copy or to an arrival before it."""
        return False

    def close(self) -> None:
        """Nothing is held."""

    @property
    def next_load_end_s(self) -> float:
        """When the next copy ends; infinity if none is under way."""
        return self._loads[0].moment_s if self._loads else math.inf

    def _copy(self, load: AdapterLoad, ready_s: float) -> None:
        self.reloads += load.uid in self._loaded
        self._loaded.add(load.uid)
        self._loads.append(LoadEnd(load.uid, self._link.send(ready_s, self._image_bytes(load.uid))))

    def _work(self, plan: StepPlan) -> tuple[StepWork, Ints]:
        """What a step computes, and the seats that it samples for."""
        if plan.decode is not self._decode[0]:  # the same object while nobody comes or goes
            self._decode = plan.decode, np.array(plan.decode, dtype=np.int64)
        decode = self._decode[1]
        self._kv_tokens[decode] += 1
        seats = sampled = decode
        if plan.chunks:
            chunked = np.array([chunk.seat for chunk in plan.chunks])
            self._kv_tokens[chunked] = [chunk.first + chunk.count for chunk in plan.chunks]
            seats = np.concatenate((decode, chunked))
            samples = np.array([chunk.samples for chunk in plan.chunks])
            sampled = np.concatenate((decode, chunked[samples]))
        return StepWork(
            decode_rows=len(decode),
            chunk_tokens=sum(chunk.count for chunk in plan.chunks),
            context_tokens=int(self._kv_tokens[seats].sum()),
            adapter_bytes=self._distinct_bytes(self._adapter[seats]),
        ), sampled

    def _distinct_bytes(self, adapters: Ints) -> int:
        """Bytes of these adapters, each once."""
        self._in_step[adapters] = 1.0
        num_bytes = int(self._adapter_bytes @ self._in_step)
        self._in_step[adapters] = 0.0
        return num_bytes

    def _sample(self, seats: Ints) -> StepResult:
        self._left[seats] -= 1
        if not (self._left[seats] == 0).any():
            if len(self._steady.token_ids) != len(seats):
                self._steady = StepResult((GOES_ON,) * len(seats))
            return self._steady
        return StepResult(tuple(np.where(self._left[seats] == 0, ENDS, GOES_ON).tolist()))
