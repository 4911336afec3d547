"""Executes plans on a GPU: changes of seats and adapters, one forward pass, one sampling. Decides nothing.

    host    | plan k+1 | launch k+1: stage, send, replay | wait for k's tokens, commit k | plan k+2 | ...
    device  |      ... step k ...              | step k+1 ...

What a step computes, and how, is `forward`'s. Nothing waits for the device but `CudaStepHandle.result`, and the engine
asks for that only when the next step is under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from interleaf.adapters.copy import LoadReport, StreamCopier
from interleaf.attention.device import DeviceAttention
from interleaf.core import AdapterUid, PooledLayout, StepPlan, StepResult
from interleaf.engine.cuda.device import Device
from interleaf.engine.cuda.forward import StepForward
from interleaf.engine.cuda.handle import CudaStepHandle, RunnerStats, nothing
from interleaf.engine.cuda.inputs import DeviceInputs
from interleaf.engine.cuda.pace import Pace
from interleaf.engine.cuda.staging import Staging
from interleaf.engine.device_sampler import DeviceSampler, PendingSample
from interleaf.engine.swap import HostPages
from interleaf.errors import EngineDead
from interleaf.kernels.device_lora import DeviceLora
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Transformer


class CudaRunner:
    """Runs one rank's model on one GPU. `launch` and `poll_loads` belong to one thread.

    Args:
        pool: with one page more than the allocator has, the last, which rows that pad a batch write to.
        max_rows: rows of a step at most.
        max_pages: pages of the longest sequence.
        max_graphs: captured graphs kept at most; 0 = every step is launched kernel by kernel.
        max_mixed_graph_rows: of a step with prompts that replays graphs; `lora` must take as many. None: `num_seats`.
        swap: where plans swap pages to; None: they swap none.
        copy_page_s: seconds that the copy of an adapter's page takes, as far as is known.
    """

    def __init__(
        self,
        *,
        device: Device,
        model: Transformer,
        pool: PagePool,
        attention: DeviceAttention,
        sampler: DeviceSampler,
        lora: DeviceLora,
        copier: StreamCopier,
        num_seats: int,
        max_rows: int,
        max_pages: int,
        max_graphs: int,
        max_mixed_graph_rows: int | None = None,
        swap: HostPages | None = None,
        copy_page_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._lora = lora
        self._copier = copier
        self._swap = swap
        self._copy_page_s = copy_page_s
        self._pace = Pace()
        self._inputs = DeviceInputs(
            num_seats, pool.geometry.page_tokens, max_pages, pool.num_pages - 1, device.torch_device
        )
        self._staging = Staging(device, DeviceInputs.staged_bytes(num_seats, max_rows, max_pages))
        self._tokens = [device.pinned(8 * num_seats).view(torch.int64) for _ in range(2)]
        self._not_loaded: set[AdapterUid] = set()  # whose load has failed, and whose pages are to be given back yet
        self._stats = RunnerStats()
        self._forward = StepForward(
            device=device,
            model=model,
            pool=pool,
            attention=attention,
            sampler=sampler,
            lora=lora,
            inputs=self._inputs,
            staging=self._staging,
            stats=self._stats,
            num_seats=num_seats,
            max_graphs=max_graphs,
            max_mixed_graph_rows=max_mixed_graph_rows or num_seats,
        )
        self._failure: BaseException | None = None
        device.synchronize()  # what was made up to here was filled on whatever stream was current

    def stats(self) -> RunnerStats:
        """Totals since the start; the object goes on counting."""
        self._forward.count_captures()
        return self._stats

    def launch(self, plan: StepPlan) -> CudaStepHandle:
        """Begin a step. What it raises is raised by the handle, and every later step fails too."""
        began = time.perf_counter()
        if self._failure is None:
            try:
                with torch.inference_mode(), self._device.computing():
                    return self._launch(plan)
            except BaseException as error:
                self._failure = error
                return CudaStepHandle(None, nothing, failure=error)
            finally:
                took = time.perf_counter() - began
                self._pace.launched(took)
                self._stats.launch_seconds += took
        dead = EngineDead(f"step {plan.step} follows a step that failed: {self._failure!r}")
        dead.__cause__ = self._failure
        return CudaStepHandle(None, nothing, failure=dead)

    def poll_loads(self) -> list[LoadReport]:
        """Adapters' copies that have ended since the last call, or will have when the next step can begin."""
        if not self._copier.num_under_way:
            return self._copier.poll()
        with self._device.computing():
            return self._copier.poll(int(self._pace.left_s(time.perf_counter()) / self._copy_page_s()))

    def spare_s(self) -> float:
        """Seconds that may pass before the next launch without leaving the device idle, as far as is known."""
        return self._pace.spare_s(time.perf_counter())

    def wait_for_load(self) -> bool:
        """Wait for the oldest copy under way. Returns: whether there was one."""
        return self._copier.wait()

    def close(self) -> None:
        """Wait for what was launched."""
        self._device.synchronize()
        self._copier.close()

    # ------------------------------------------------------------------ for the warm-up

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows of the decode steps that can be captured, ascending; none if graphs are off."""
        return self._forward.capacities

    @property
    def mixed_graph_rows(self) -> int:
        """Rows of steps with prompts that can be captured, at most; 0 if graphs are off."""
        return self._forward.mixed_graph_rows

    def know_adapters(self, adapters: Mapping[AdapterUid, tuple[PooledLayout, Sequence[int]]]) -> None:
        """Take it that these adapters lie in these pages, without copying anything."""
        with torch.inference_mode(), self._device.computing():
            for uid, (layout, pages) in adapters.items():
                self._lora.add(uid, layout, pages)

    def warm_sampler(self) -> None:
        """Compile and load what sampling launches."""
        with torch.inference_mode(), self._device.computing():
            self._sampler.warm_up(self._model.dtype)

    def warm_lora(self) -> None:
        """Compile and load every LoRA launch that any adapters can need (see `DeviceLora.warm`)."""
        with torch.inference_mode(), self._device.computing():
            self._lora.warm(self._pool.data)

    def warmed_up(self) -> None:
        """From now on steps count: those that a captured graph will do for are captured no more."""
        self._forward.lets_stand_in = True

    def forget_adapters(self, uids: Iterable[AdapterUid]) -> None:
        """Undo `know_adapters`."""
        for uid in uids:
            self._lora.remove(uid)

    # ------------------------------------------------------------------ one step

    def _launch(self, plan: StepPlan) -> CudaStepHandle:
        self._staging.begin()
        self._apply(plan)
        if not plan.num_tokens:
            self._forward.send()
            return CudaStepHandle(None, nothing)
        return self._read_back(plan, *self._forward.compute(plan))

    def _apply(self, plan: StepPlan) -> None:
        """Everything but rows, in the order that StepPlan documents: what is given back comes before what is taken."""
        for seat in plan.vacate:
            self._inputs.vacate(seat)
            self._sampler.vacate(seat)
        # On the compute stream: after the steps that wrote the pages, before the event that adapters' copies wait for.
        if plan.swap_out:
            self._host_pages.copy_out(plan.swap_out)
        for uid in plan.evict:
            if uid not in self._not_loaded:
                self._lora.remove(uid)
            self._not_loaded.discard(uid)
        for load in plan.load:
            layout = self._copier.copy(load)
            if layout is None:
                self._not_loaded.add(load.uid)
            else:
                self._lora.add(load.uid, layout, load.pages)
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

    def _read_back(self, plan: StepPlan, tokens: torch.Tensor | None, pending: PendingSample | None) -> CudaStepHandle:
        """Enqueue the copy of what was sampled to the host."""
        if pending is not None:
            finish = pending.read_back(self._device.pinned)
        elif tokens is not None:
            host = self._tokens[plan.step % 2][: len(tokens)]
            host.copy_(tokens, non_blocking=True)

            def finish() -> StepResult:
                return StepResult(tuple(host.tolist()))
        else:
            finish = nothing
        arrived = self._device.event()
        arrived.record()
        self._pace.begin(plan.num_tokens, time.perf_counter())
        return CudaStepHandle(arrived, finish, self._waited)

    def _waited(self, began_s: float, ended_s: float) -> None:
        self._pace.end(ended_s)
        self._stats.wait_seconds += ended_s - began_s
