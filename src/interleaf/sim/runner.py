"""Executes plans in no time and says how much they would have taken. Knows seats and sizes, never a tensor or a token.

One stream computes: a step begins when the one before has ended. Copies travel on a link beside it, in order. A copy
begins no sooner than its step: the pages may have been somebody else's until the step before has ended. Pages that are
swapped hold the step up: those to the host, on a link of their own, before anything writes to the pages, then those
from it.

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

from interleaf.core import AdapterLoad, AdapterUid, SeatStart, StepPlan, StepResult
from interleaf.sim.cost import CostModel, StepWork
from interleaf.sim.link import Clock, Link
from interleaf.sim.workload import BASE, Floats, Workload

GOES_ON, ENDS = 1, 0
"""The two tokens that a simulated model knows."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """One copy, and when it ends."""

    uid: AdapterUid
    moment_s: float
    error: str | None = None


@dataclass(slots=True)
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

    A sequence's seed is its request's number in the workload; so a plan says whom it serves. Sums over the decoding
    seats are renewed when somebody comes or goes; else a step adds a token to each.

    Args:
        adapter_bytes: weights that a step reads of each adapter.
        image_bytes: of an adapter's copy.
        page_bytes: of a page that is swapped.   link_out: to the host.
        record: called with the work and the seconds of every step that has rows.
    Attributes:
        reloads: copies of adapters that had been copied before.
        busy_s: seconds of steps, and of the copies that held them up.   host_s: real time spent in here.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        cost: CostModel,
        link: Link,
        workload: Workload,
        index_of: dict[AdapterUid, int],
        adapter_bytes: list[int],
        image_bytes: Callable[[AdapterUid], int],
        page_bytes: int,
        link_out: Link,
        num_seats: int,
        record: Callable[[StepWork, float], None] | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._link = link
        self._index_of = index_of
        self._image_bytes = image_bytes
        self._page_bytes = page_bytes
        self._link_out = link_out
        self._record = record
        self._output_tokens = workload.output_tokens.tolist()
        self._adapter_bytes = [*adapter_bytes, 0]  # BASE, which is -1, finds the last

        self._request = [0] * num_seats
        self._adapter = [BASE] * num_seats
        self._left = [0] * num_seats  # tokens to come when the known ones are computed
        self._kv_at_0 = [0] * num_seats  # while it decodes: tokens of KV in step k, less k
        self._last_step = [-1] * num_seats  # the step that samples the last token, once that is known
        self._ends: dict[int, list[int]] = {}  # seats by that step; entries of those that were preempted stay behind
        self._decode: tuple[int, ...] = ()
        self._decode_kv_at_0 = 0
        self._decode_adapters: set[int] = set()
        self._decode_adapter_bytes = 0

        self._busy_until_s = 0.0
        self._loads: deque[LoadEnd] = deque()
        self._loaded: set[AdapterUid] = set()
        self._steady = StepResult(())
        self._first_token_s: list[float | None] = [None] * len(workload)
        self._started_s: list[float | None] = [None] * len(workload)
        self.reloads = 0
        self.busy_s = 0.0
        self.host_s = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        entered = time.perf_counter()
        ready_s = start_s = max(self._busy_until_s, self._clock.now)
        if plan.swap_out:
            ready_s = start_s = self._link_out.send(ready_s, len(plan.swap_out) * self._page_bytes)
        if plan.swap_in:
            start_s = self._link.send(ready_s, len(plan.swap_in) * self._page_bytes)
        for load in plan.load:
            self._copy(load, ready_s)
        for seat in plan.vacate:
            self._last_step[seat] = -1
        for start in plan.start:
            self._seat(start, start_s)
        work = self._work(plan)
        duration_s = self._cost.step_s(work)
        if self._record is not None and work.rows:
            self._record(work, duration_s)
        end_s = start_s + duration_s
        self.busy_s += end_s - max(self._busy_until_s, self._clock.now)
        self._busy_until_s = end_s
        for chunk in plan.chunks:
            if chunk.samples:
                seat = chunk.seat
                if self._first_token_s[self._request[seat]] is None:
                    self._first_token_s[self._request[seat]] = end_s
                self._kv_at_0[seat] = chunk.first + chunk.count - plan.step
                last_step = self._last_step[seat] = plan.step + self._left[seat] - 1
                self._ends.setdefault(last_step, []).append(seat)
        launched = Launched(self._clock, end_s, self._sample(plan))
        self.host_s += time.perf_counter() - entered
        return launched

    def poll_loads(self) -> list[LoadEnd]:
        ended = []
        while self._loads and self._loads[0].moment_s <= self._clock.now:
            ended.append(self._loads.popleft())
        return ended

    def spare_s(self) -> float:
        """No step waits for requests to come: in simulated time they have come when they are due."""
        return 0.0

    def wait_for_load(self) -> bool:
        """No wait here: whoever drives the engine moves the clock, to the end of a copy or to an arrival before it."""
        return False

    def close(self) -> None:
        """Nothing is held."""

    @property
    def next_load_end_s(self) -> float:
        """When the next copy ends; infinity if none is under way."""
        return self._loads[0].moment_s if self._loads else math.inf

    @property
    def first_token_s(self) -> Floats:
        """[requests], when a request's first token was there; NaN: not yet."""
        return np.array(self._first_token_s, dtype=np.float64)

    @property
    def started_s(self) -> Floats:
        """[requests], when the step began in which a request first had a seat; NaN: not yet."""
        return np.array(self._started_s, dtype=np.float64)

    def _copy(self, load: AdapterLoad, ready_s: float) -> None:
        self.reloads += load.uid in self._loaded
        self._loaded.add(load.uid)
        self._loads.append(LoadEnd(load.uid, self._link.send(ready_s, self._image_bytes(load.uid))))

    def _seat(self, start: SeatStart, start_s: float) -> None:
        seat, request = start.seat, start.seed
        self._request[seat] = request
        self._adapter[seat] = BASE if start.adapter is None else self._index_of[start.adapter]
        self._left[seat] = self._output_tokens[request] - (len(start.token_ids) - start.prompt_tokens)
        if self._started_s[request] is None:
            self._started_s[request] = start_s

    def _work(self, plan: StepPlan) -> StepWork:
        """What a step computes."""
        decode = plan.decode
        if decode is not self._decode:  # the same object while nobody comes or goes
            self._decode = decode
            self._decode_kv_at_0 = sum(map(self._kv_at_0.__getitem__, decode))
            self._decode_adapters = set(map(self._adapter.__getitem__, decode))
            self._decode_adapter_bytes = sum(map(self._adapter_bytes.__getitem__, self._decode_adapters))
        rows = len(decode)
        work = StepWork(rows, 0, self._decode_kv_at_0 + rows * plan.step, self._decode_adapter_bytes)
        if plan.chunks:
            others: set[int] = set()
            for chunk in plan.chunks:
                work.chunk_tokens += chunk.count
                work.context_tokens += chunk.first + chunk.count
                others.add(self._adapter[chunk.seat])
            others -= self._decode_adapters
            work.adapter_bytes += sum(map(self._adapter_bytes.__getitem__, others))
        return work

    def _sample(self, plan: StepPlan) -> StepResult:
        """The tokens of a step: an end token for each sequence that has all its tokens with it."""
        last = [seat for seat in self._ends.pop(plan.step, ()) if self._last_step[seat] == plan.step]
        if last:
            sampled = plan.sampled_seats
            tokens = [GOES_ON] * len(sampled)
            for seat in last:
                tokens[sampled.index(seat)] = ENDS
            return StepResult(tuple(tokens))
        count = len(plan.decode) + sum(chunk.samples for chunk in plan.chunks)
        if len(self._steady.token_ids) != count:
            self._steady = StepResult((GOES_ON,) * count)
        return self._steady
