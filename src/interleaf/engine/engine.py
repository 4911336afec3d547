"""The step loop: inbox, plan, launch, read back, commit. Knows plans and events; no tensor, no text, no name.

    step k      |── plan k ──|── launch k ──▶ (device runs k) ...
    step k+1                                |── plan k+1 ──|── launch k+1 ──|── read k, commit k ──▶ events

With `lookahead=1` the host plans step k+1 while step k runs and reads step k only after k+1 has been launched, so the
device never waits for the host. With 0 a step is read before the next is planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from interleaf.core import AdapterUid, Event, Request, StepPlan, StepResult
from interleaf.errors import EngineDead
from interleaf.scheduler.scheduler import Scheduler


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled; raises what the step raised."""


class LoadReport(Protocol):
    """The end of one adapter's copy; `error` is None when later steps may read it."""

    @property
    def uid(self) -> AdapterUid: ...

    @property
    def error(self) -> str | None: ...


class Runner(Protocol):
    """Executes plans in the order they are launched (`engine/runner.py`)."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin a step; does not wait for it."""

    def poll_loads(self) -> Iterable[LoadReport]:
        """Copies that have ended since the last call."""

    def spare_s(self) -> float:
        """Seconds that may pass before the next launch without leaving anybody idle, as far as is known."""

    def wait_for_load(self) -> bool:
        """Wait for the oldest copy under way. Returns: whether there was one."""

    def close(self) -> None:
        """Wait for what was launched and release everything."""


class Engine:
    """Turns requests into events, one step at a time. Not thread-safe: one thread owns it.

    Args:
        now: seconds, monotonic; what takes too long is given up by it.

    Attributes:
        is_stalled: the last step found nothing to do: open requests wait for the host tier, or none is open.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, lookahead: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lookahead = lookahead
        self._now = now
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._failure: BaseException | None = None
        self.is_stalled = False
        self.num_steps = 0
        self.num_computed_tokens = 0

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; false once a step has failed."""
        return self._failure is None

    @property
    def has_work(self) -> bool:
        """Whether requests are open, steps in flight, or events untold: an abort may have ended the last request."""
        return self._scheduler.has_requests or bool(self._in_flight) or self._scheduler.has_events

    @property
    def spare_s(self) -> float:
        """Seconds for which `step` may be put off, so that a request which comes meanwhile is in the next step.

        0 where that would help nobody: others wait to start as it is, or whoever came could not.
        """
        if self._failure is not None or not self._in_flight or not self._scheduler.would_start_at_once:
            return 0.0
        return self._runner.spare_s()

    @property
    def num_output_tokens(self) -> int:
        """Of all steps that have been read."""
        return self._scheduler.num_output_tokens

    def submit(self, request: Request, stop_ids: frozenset[int], seed: int) -> None:
        """Accept a request; from now on it ends in exactly one terminal event.

        Raises: EngineDead: the step loop has failed.
        """
        self.require_alive()
        self._scheduler.add(request, stop_ids, seed)

    def require_alive(self) -> None:
        """Raises: EngineDead: the step loop has failed, or the engine was closed."""
        if self._failure is not None:
            raise EngineDead(f"the engine has stopped: {self._failure!r}") from self._failure

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences. Unknown and ended ones are left alone."""
        self._scheduler.at(self._now())
        self._scheduler.abort(request_id, index)

    def step(self) -> list[Event]:
        """Plan and launch one step, and read back the one before. Returns: what has happened."""
        try:
            self._advance()
        except Exception as error:
            self._failure = error
            self._in_flight.clear()
            self._scheduler.at(self._now())
            self._scheduler.fail_all(f"the engine has stopped: {error!r}")
        return self._scheduler.take_events()

    def close(self) -> None:
        """End every request, refuse new ones and release the runner. Returns after the last launched step."""
        self._failure = self._failure or EngineDead("it was closed")
        self._in_flight.clear()
        self._scheduler.at(self._now())
        self._scheduler.fail_all("the engine was closed")
        self._runner.close()

    def _advance(self) -> None:
        self._scheduler.at(self._now())
        for report in self._runner.poll_loads():
            self._scheduler.load_done(report.uid, report.error)
        plan = self._scheduler.plan(self._now()) if self._failure is None else None
        if plan is not None:
            self._in_flight.append((plan, self._runner.launch(plan)))
            self.num_steps += 1
            self.num_computed_tokens += plan.num_tokens
        # With nothing to compute, the next thing to happen is the end of a copy.
        self.is_stalled = plan is None and not self._in_flight and not self._runner.wait_for_load()
        # When nothing was planned, everything that is left to do hangs on what is in flight.
        while len(self._in_flight) > self._lookahead or (plan is None and self._in_flight):
            launched, handle = self._in_flight[0]
            result = handle.result()  # an interrupt while waiting leaves the step where it is
            self._in_flight.popleft()
            self._scheduler.at(self._now())
            self._scheduler.commit(launched, result)
