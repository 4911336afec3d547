"""Executes plans on a GPU: changes of seats and adapters, one forward pass, one sampling. Decides nothing.

    host    | plan k+1 | launch k+1: stage, send, replay | wait for k's tokens, commit k | plan k+2 | ...
    device  |      ... step k ...              | step k+1 ...

A step of decode rows replays a captured graph; one with few prompt tokens besides a graph per layer (`pieces`); any
other is launched kernel by kernel, which for so many rows takes less time than computing. Nothing here waits for the
device but `CudaStepHandle.result`, and the engine asks for that only when the next step is under way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from interleaf.adapters.copy import LoadReport, StreamCopier
from interleaf.attention.device import DeviceAttention
from interleaf.core import AdapterUid, PooledLayout, StepPlan, StepResult
from interleaf.engine.cuda.device import Device, Event, Graph
from interleaf.engine.cuda.graphs import GraphCache
from interleaf.engine.cuda.inputs import DeviceInputs, Rows
from interleaf.engine.cuda.pace import Pace
from interleaf.engine.cuda.pieces import Pieces, PiecewiseForward
from interleaf.engine.cuda.staging import Staging
from interleaf.engine.device_sampler import DeviceSampler, PendingSample, SamplingKind
from interleaf.engine.swap import HostPages
from interleaf.errors import EngineDead
from interleaf.kernels.device_lora import DeviceLora, LoraStep
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Batch, Transformer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunnerStats:
    """Totals since the start.

    Attributes:
        num_steps: with rows.   num_graph_steps: of them, those that replayed one graph.
        num_mixed_steps: of them, those with prompt chunks.   num_piecewise_steps: of these, those that ran in pieces.
        num_captures, capture_seconds: of graphs.
        launch_seconds: host time in `launch`.   wait_seconds: host time spent waiting for the device.
    """

    num_steps: int = 0
    num_graph_steps: int = 0
    num_mixed_steps: int = 0
    num_piecewise_steps: int = 0
    num_captures: int = 0
    capture_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Decode:
    """A captured decode step, and where a replay leaves its result."""

    graph: Graph
    result: torch.Tensor


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
            if self._waited is not None:
                self._waited(began, time.perf_counter())
        return self._finish()


class CudaRunner:
    """Runs one rank's model on one GPU. `launch` and `poll_loads` belong to one thread.

    Args:
        pool: with one page more than the allocator has, the last, which rows that pad a batch write to.
        max_rows: rows of a step at most.
        max_pages: pages of the longest sequence.
        max_graphs: captured graphs kept at most; 0 = every step is launched kernel by kernel.
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
        swap: HostPages | None = None,
        copy_page_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sampler = sampler
        self._lora = lora
        self._copier = copier
        self._swap = swap
        self._copy_page_s = copy_page_s
        self._pace = Pace()
        self._num_seats = num_seats
        self._inputs = DeviceInputs(
            num_seats, pool.geometry.page_tokens, max_pages, pool.num_pages - 1, device.torch_device
        )
        self._staging = Staging(device, DeviceInputs.staged_bytes(num_seats, max_rows, max_pages))
        self._graphs: GraphCache[_Decode] | None = None
        self._mixed_graphs: GraphCache[Pieces] | None = None
        if max_graphs:
            self._graphs = GraphCache(num_seats, max_graphs)
            self._mixed_graphs = GraphCache(num_seats, -(-max_graphs // 4))
            self._pieces = PiecewiseForward(device, model, pool.data, num_seats)
        self._tokens = [device.pinned(8 * num_seats).view(torch.int64) for _ in range(2)]
        self._outside: torch.Tensor | None = None  # logits for `sample_outside`, made when a decode step first needs it
        self._not_loaded: set[AdapterUid] = set()  # whose load has failed, and whose pages are to be given back yet
        self._stats = RunnerStats()
        self._failure: BaseException | None = None
        device.synchronize()  # what was made up to here was filled on whatever stream was current

    def stats(self) -> RunnerStats:
        """Totals since the start; the object goes on counting."""
        graphs = [cache for cache in (self._graphs, self._mixed_graphs) if cache is not None]
        self._stats.num_captures = sum(cache.num_captures for cache in graphs)
        self._stats.capture_seconds = sum(cache.capture_seconds for cache in graphs)
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
                return CudaStepHandle(None, _nothing, failure=error)
            finally:
                self._stats.launch_seconds += time.perf_counter() - began
        dead = EngineDead(f"step {plan.step} follows a step that failed: {self._failure!r}")
        dead.__cause__ = self._failure
        return CudaStepHandle(None, _nothing, failure=dead)

    def poll_loads(self) -> list[LoadReport]:
        """Adapters' copies that have ended since the last call, or will have when the next step can begin."""
        if not self._copier.num_under_way:
            return self._copier.poll()
        with self._device.computing():
            return self._copier.poll(int(self._pace.left_s / self._copy_page_s()))

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
        return () if self._graphs is None else self._graphs.capacities

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

    def forget_adapters(self, uids: Iterable[AdapterUid]) -> None:
        """Undo `know_adapters`."""
        for uid in uids:
            self._lora.remove(uid)

    # ------------------------------------------------------------------ one step

    def _launch(self, plan: StepPlan) -> CudaStepHandle:
        self._staging.begin()
        self._apply(plan)
        if not plan.num_tokens:
            self._send()
            return CudaStepHandle(None, _nothing)
        self._stats.num_steps += 1
        self._stats.num_mixed_steps += bool(plan.chunks)
        if self._graphs is None or plan.chunks:
            tokens, pending = self._mixed(plan)
        else:
            tokens, pending = self._decode(plan, self._graphs)
        return self._read_back(plan, tokens, pending)

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

    def _send(self) -> None:
        changes = self._inputs.take_table_changes(self._staging)
        self._staging.send()
        self._inputs.apply_table_changes(changes)

    def _decode(self, plan: StepPlan, graphs: GraphCache[_Decode]) -> tuple[torch.Tensor | None, PendingSample | None]:
        num_rows = len(plan.decode)
        capacity = graphs.capacity(num_rows)
        rows = self._inputs.decode_rows(plan, capacity, self._num_seats, self._staging)
        lora = self._lora.plan(rows.segments, graph=True)
        kind = self._sampler.kind(plan.decode)
        self._sampler.flush()
        self._send()
        attention = self._attention.prepare_graph(rows.device)
        if lora is not None:
            lora.upload()

        # Where graphs leave logits, they all leave them in one place: each its own would add up to gigabytes.
        outside = self._logits() if kind is SamplingKind.OUTSIDE else None

        def run() -> torch.Tensor:
            batch = Batch(
                token_ids=self._sampler.last_token.index_select(0, rows.seats),
                positions=rows.device.positions,
                attention=attention,
                lora=None if lora is None else lora.work,
            )
            logits = forward(batch, self._pool.data)
            if outside is not None:
                return outside[:capacity].copy_(logits)
            return self._sampler.choose(logits, rows.seats, kind)

        forward = self._model.forward
        key = (capacity, _lora_key(lora), kind)
        captured = graphs.find(key)
        if captured is None and graphs.is_due(key):
            captured = graphs.keep(key, lambda: _Decode(*self._device.capture(run)))
        if captured is None:
            forward = self._forward
            result = run()
        else:
            captured.graph.replay()
            result = captured.result
            self._stats.num_graph_steps += 1
        if kind is SamplingKind.OUTSIDE:
            return None, self._sampler.sample_outside(result[:num_rows], plan.decode, rows.seats[:num_rows])
        return result[:num_rows], None

    def _forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """The model's forward pass, kernel by kernel."""

        def compute() -> torch.Tensor:
            return self._model.forward(batch, pool)

        return self._with_memory(compute, compute)

    def _with_memory(
        self, compute: Callable[[], torch.Tensor], without_graphs: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Compute logits; where memory is short for that, graphs give up theirs.

        A pass that was broken off may be repeated: it writes nothing but its own rows' K and V.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            logger.warning("memory is short, all graphs are given up: %s", str(error).partition(".")[0])
        for graphs in (self._graphs, self._mixed_graphs):
            if graphs is not None:
                graphs.clear()
        self._device.reclaim()
        return without_graphs()

    def _logits(self) -> torch.Tensor:
        if self._outside is None:
            shape = self._num_seats, self._model.spec.vocab_size
            self._outside = torch.empty(shape, dtype=self._model.dtype, device=self._device.torch_device)
        return self._outside

    def _mixed(self, plan: StepPlan) -> tuple[torch.Tensor | None, PendingSample | None]:
        rows = self._inputs.rows(plan, self._staging)
        in_pieces = self._mixed_graphs is not None and plan.num_tokens <= self._pieces.max_rows
        lora = self._lora.plan(rows.segments, graph=in_pieces)
        kind = self._sampler.kind(plan.sampled_seats)
        self._sampler.flush()
        self._send()
        attention = self._attention.prepare(rows.device)
        if lora is not None:
            lora.upload()
        work = None if lora is None else lora.work
        token_ids = self._token_ids(rows)
        if in_pieces:

            def run(pieces: Pieces) -> torch.Tensor:
                return self._pieces.run(pieces, token_ids, rows.device.positions, attention, rows.sampled)

            logits = self._with_memory(
                lambda: run(self._pieces_of(plan.num_tokens, lora)),
                lambda: run(self._pieces.uncaptured(self._pieces.capacity(plan.num_tokens), work)),
            )
        else:
            logits = self._forward(
                Batch(token_ids, rows.device.positions, attention, rows.sampled, work), self._pool.data
            )
        if not plan.sampled_seats:
            return None, None
        if kind is SamplingKind.OUTSIDE:
            return None, self._sampler.sample_outside(logits, plan.sampled_seats, rows.sampled_seats)
        return self._sampler.choose(logits, rows.sampled_seats, kind), None

    def _pieces_of(self, num_rows: int, lora: LoraStep | None) -> Pieces:
        graphs = self._mixed_graphs
        assert graphs is not None
        capacity = self._pieces.capacity(num_rows)
        key = ("pieces", capacity, _lora_key(lora))
        work = None if lora is None else lora.work
        captured = graphs.find(key)
        if captured is None and graphs.is_due(key):
            captured = graphs.keep(key, lambda: self._pieces.capture(capacity, work))
        if captured is None:
            return self._pieces.uncaptured(capacity, work)
        self._stats.num_piecewise_steps += 1
        return captured

    def _token_ids(self, rows: Rows) -> torch.Tensor:
        last = self._sampler.last_token.index_select(0, rows.seats[: rows.device.num_decode])
        return last if rows.chunk_tokens is None else torch.cat([last, rows.chunk_tokens])

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
            finish = _nothing
        arrived = self._device.event()
        arrived.record()
        self._pace.begin(plan.num_tokens, time.perf_counter())
        return CudaStepHandle(arrived, finish, self._waited)

    def _waited(self, began_s: float, ended_s: float) -> None:
        self._pace.end(ended_s)
        self._stats.wait_seconds += ended_s - began_s


def _nothing() -> StepResult:
    return StepResult(())


def _lora_key(lora: LoraStep | None) -> Hashable:
    return None if lora is None else lora.key
