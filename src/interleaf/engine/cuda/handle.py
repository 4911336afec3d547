"""A step that was launched, and what steps have cost so far. Knows no plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from interleaf.core import StepResult
from interleaf.engine.cuda.device import Event


@dataclass(slots=True)
class RunnerStats:
    """Totals since the start.

    Attributes:
        num_steps: with rows.   num_graph_steps: of them, those that replayed one graph.
        num_mixed_steps: of them, those with prompt chunks.   num_piecewise_steps: of these, those that ran in pieces.
        num_stand_ins: steps that replayed what had been captured for others, rather than be captured.
        num_captures, capture_seconds: of graphs.
        launch_seconds: host time in `launch`.   wait_seconds: host time spent waiting for the device.
    """

    num_steps: int = 0
    num_graph_steps: int = 0
    num_mixed_steps: int = 0
    num_piecewise_steps: int = 0
    num_stand_ins: int = 0
    num_captures: int = 0
    capture_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0


class CudaStepHandle:
    """A step that was launched.

    Args:
        finish: makes the result of what has arrived on the host; called once, after `arrived`.
        waited: told when waiting for the step began and ended.
    """

    __slots__ = ("_arrived", "_failure", "_finish", "_waited")

    def __init__(
        self,
        arrived: Event | None,
        finish: Callable[[], StepResult],
        waited: Callable[[float, float], None] | None = None,
        failure: BaseException | None = None,
    ) -> None:
        self._arrived = arrived
        self._finish = finish
        self._waited = waited
        self._failure = failure

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._arrived is None or self._arrived.query()

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled; raises what the step raised."""
        if self._failure is not None:
            raise self._failure
        if self._arrived is not None:
            began = time.perf_counter()
            self._arrived.synchronize()
            waited, self._waited = self._waited, None  # an interrupt may have `result` called again
            if waited is not None:
                waited(began, time.perf_counter())
        return self._finish()


def nothing() -> StepResult:
    """The result of a step that samples nothing."""
    return StepResult(())
