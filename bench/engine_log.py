"""What a run did, step by step and token by token, noted while it runs and made sense of afterwards.

Noting costs a few microseconds a step: plans are kept as they are, and of a step's events only whose they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from interleaf.core import AdapterUid, Event, StepPlan, StepResult
from interleaf.engine.engine import LoadReport, Runner
from interleaf.memory.allocator import OwnerKind, PageAllocator


@dataclass(slots=True)
class StepLog:
    """The steps since the last reset.

    Attributes:
        plans: in the order they were launched.
        launched_s: when the host began to launch each step.
        done_s: when the host had read each step; `time.perf_counter`.
        waited_s: seconds spent waiting for steps that were still running.
        num_starved: steps that had ended before the host came to read them, so that the device had to wait.
    """

    plans: list[StepPlan] = field(default_factory=list)
    launched_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    num_starved: int = 0
    peak_adapter_pages: int = 0
    peak_kv_pages: int = 0


class RecordingRunner:
    """A runner that keeps what it was asked to do, and has the runner behind it do it.

    Attributes:
        annotate: called with a plan, gives a context in which the plan is launched; for a profiler's timeline.
        apart: adapters that the engine's scheduler does not know of; reports of their copies are kept from it.
    """

    def __init__(self, runner: Runner, allocator: PageAllocator) -> None:
        self._runner = runner
        self._allocator = allocator
        self.log = StepLog()
        self.annotate: Any = None
        self.apart: set[AdapterUid] = set()
        self._reports_apart: list[LoadReport] = []

    def reset(self) -> StepLog:
        """Forget the steps noted so far. Returns: where the next ones will stand."""
        self.log = StepLog()
        return self.log

    def launch(self, plan: StepPlan) -> _RecordedStep:
        """Begin a step."""
        log = self.log
        log.launched_s.append(time.perf_counter())
        if self.annotate is None:
            handle = self._runner.launch(plan)
        else:
            with self.annotate(plan):
                handle = self._runner.launch(plan)
        log.plans.append(plan)
        log.peak_adapter_pages = max(log.peak_adapter_pages, self._allocator.num_used_pages(OwnerKind.ADAPTER))
        log.peak_kv_pages = max(log.peak_kv_pages, self._allocator.num_used_pages(OwnerKind.KV))
        return _RecordedStep(handle, log)

    def spare_s(self) -> float:
        """Seconds for which the device has enough to do."""
        return self._runner.spare_s()

    def wait_for_load(self) -> bool:
        """Wait for the oldest copy under way: there is nothing to compute until it ends."""
        begin = time.perf_counter()
        was_one = self._runner.wait_for_load()
        self.log.waited_s += time.perf_counter() - begin
        return was_one

    def poll_loads(self) -> Iterable[LoadReport]:
        """Copies that have ended since the last call."""
        reports = self._runner.poll_loads()
        if not self.apart:
            return reports
        reports = list(reports)
        self._reports_apart += [report for report in reports if report.uid in self.apart]
        return [report for report in reports if report.uid not in self.apart]

    def launch_apart(self, plan: StepPlan) -> None:
        """Have a plan without rows executed that is not the scheduler's."""
        self._runner.launch(plan)

    def take_reports_apart(self) -> list[LoadReport]:
        """Ends of copies that are not the scheduler's, since the last call."""
        reports, self._reports_apart = self._reports_apart, []
        return reports

    def close(self) -> None:
        """Release the runner."""
        self._runner.close()


class _RecordedStep:
    """The handle of a step: notes how long its result was waited for, and when it was there."""

    __slots__ = ("_handle", "_log")

    def __init__(self, handle: Any, log: StepLog) -> None:
        self._handle = handle
        self._log = log

    def result(self) -> StepResult:
        """Wait for the step."""
        log, ready = self._log, getattr(self._handle, "ready", None)
        if ready is not None and ready():
            log.num_starved += 1
            result: StepResult = self._handle.result()
            log.done_s.append(time.perf_counter())
            return result
        begin = time.perf_counter()
        result = self._handle.result()
        end = time.perf_counter()
        log.waited_s += end - begin
        log.done_s.append(end)
        return result


_request_id = attrgetter("request_id")


@dataclass(slots=True)
class EventLog:
    """Whose events came when.

    Attributes:
        when_s: of every batch of events; `time.perf_counter`.
        counts: events of each batch.
        ids: the requests of all events, in order: its tokens, then its terminal event.
        types: the types of all events.
    """

    when_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    types: list[type] = field(default_factory=list)

    def note(self, when_s: float, events: list[Event]) -> None:
        """Take in what one step of the engine has told."""
        self.when_s.append(when_s)
        self.counts.append(len(events))
        self.ids.extend(map(_request_id, events))
        self.types.extend(map(type, events))
