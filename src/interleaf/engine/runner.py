"""Executes plans in order: changes of seats and adapters, one forward pass, one sampling. Decides nothing.

With `overlap` plans run on one worker thread and `launch` returns at once, so the host plans step k+1 while step k
runs; a decode row's token is the one that its seat sampled last, which the host need not have seen. Without, `launch`
runs the plan itself. Either way a plan runs after all earlier ones: everything that must not overtake hangs on that.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.adapters.copy import AdapterCopier, LoadReport
from interleaf.attention import AttentionBackend
from interleaf.core import StepPlan, StepResult
from interleaf.engine.inputs import SeatInputs
from interleaf.engine.sampler import Sampler
from interleaf.engine.swap import HostPages
from interleaf.errors import EngineDead
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that was launched."""

    _future: Future[StepResult]

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._future.done()

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled; raises what the step raised."""
        return self._future.result()


class TorchRunner:
    """Runs one rank's model on one device.

    Args:
        swap: where plans swap pages to; None: they swap none.
        num_seats: sequences that can run at a time.
        overlap: run plans on a thread of their own.
    """

    def __init__(
        self,
        model: Transformer,
        pool: PagePool,
        attention: AttentionBackend,
        sampler: Sampler,
        copier: AdapterCopier,
        num_seats: int,
        *,
        overlap: bool,
        swap: HostPages | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._copier = copier
        self._swap = swap
        self._inputs = SeatInputs(num_seats, pool, attention)
        self._failure: BaseException | None = None
        # torch keeps the number of threads per thread: the worker takes over its creator's.
        self._worker = (
            ThreadPoolExecutor(1, "interleaf-step", torch.set_num_threads, (torch.get_num_threads(),))
            if overlap
            else None
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin a step. What it raises is raised by the handle, and every later step fails too."""
        if self._worker is not None:
            return StepHandle(self._worker.submit(self._run, plan))
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._run(plan))
        except Exception as error:
            done.set_exception(error)
        return StepHandle(done)

    def poll_loads(self) -> list[LoadReport]:
        """Adapters' copies that have ended since the last call."""
        return self._copier.poll()

    def spare_s(self) -> float:
        """How long steps take is not known here."""
        return 0.0

    def wait_for_load(self) -> bool:
        """Copies are made by the steps themselves: none is ever under way between two."""
        return False

    def close(self) -> None:
        """Wait for what was launched."""
        if self._worker is not None:
            self._worker.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failure is not None:
            raise EngineDead(f"step {plan.step} follows a step that failed: {self._failure!r}") from self._failure
        try:
            with torch.inference_mode():
                self._apply(plan)
                return self._compute(plan)
        except BaseException as error:
            self._failure = error
            raise

    def _apply(self, plan: StepPlan) -> None:
        """Everything but rows, in the order that StepPlan documents: what is given back comes before what is taken."""
        for seat in plan.vacate:
            self._inputs.vacate(seat)
            self._sampler.vacate(seat)
        if plan.swap_out:
            self._host_pages.copy_out(plan.swap_out)
        for uid in plan.evict:
            self._inputs.evict(uid)
        for load in plan.load:
            layout = self._copier.copy(load)
            if layout is not None:
                self._inputs.loaded(load.uid, layout, load.pages)
        if plan.swap_in:
            self._host_pages.copy_in(plan.swap_in)
        for start in plan.start:
            self._inputs.start(start)
            self._sampler.start(
                start.seat, start.params, start.seed, start.token_ids, start.prompt_tokens, start.stop_ids
            )
        for grow in plan.grow:
            self._inputs.grow(grow)

    @property
    def _host_pages(self) -> HostPages:
        assert self._swap is not None, "a plan swaps pages, and there is no host memory for them"
        return self._swap

    def _compute(self, plan: StepPlan) -> StepResult:
        if not plan.num_tokens:
            return StepResult(())
        logits = self._model.forward(self._inputs.batch(plan), self._pool.data)
        if not plan.sampled_seats:
            return StepResult(())
        seats = np.array(plan.sampled_seats, dtype=np.int64)
        sampled = self._sampler.sample(logits, seats)
        self._inputs.sampled(seats, sampled.token_ids)
        return StepResult(tuple(sampled.token_ids.tolist()), sampled.logprobs)
