"""From the rows of a plan to what they sample: by a captured graph, in captured pieces, or kernel by kernel.

A step of decode rows replays a graph; one with few prompt tokens besides a graph per layer (`pieces`); any other is
launched kernel by kernel, which for so many rows takes less time than computing. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from interleaf.attention.device import DeviceAttention
from interleaf.core import StepPlan
from interleaf.engine.cuda.device import Device, Graph
from interleaf.engine.cuda.graphs import Captured, GraphCache, Key
from interleaf.engine.cuda.handle import RunnerStats
from interleaf.engine.cuda.inputs import DeviceInputs, Rows, Segments
from interleaf.engine.cuda.pieces import Pieces, PiecewiseForward
from interleaf.engine.cuda.staging import Staging
from interleaf.engine.device_sampler import DeviceSampler, PendingSample, SamplingKind
from interleaf.kernels.device_lora import DeviceLora, LoraStep
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Batch, Transformer

logger = logging.getLogger(__name__)

Sampled = tuple[torch.Tensor | None, PendingSample | None]
"""What was sampled: token ids on the device, or a sample that is not finished yet. Neither: nothing was to be."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """A captured decode step, and where a replay leaves its result."""

    graph: Graph
    result: torch.Tensor


class StepForward:
    """Computes one step after the other, each on the stream that is current. For arguments see `CudaRunner`.

    Args:
        inputs: what seats hold; its arrays are staged in `staging` and sent by `compute`.
        stats: counted in.

    Attributes:
        lets_stand_in: whether a step may replay a graph of other LoRA work that is as good (`DeviceLora.stand_in`)
            rather than be launched kernel by kernel, and captured.
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
        inputs: DeviceInputs,
        staging: Staging,
        stats: RunnerStats,
        num_seats: int,
        max_graphs: int,
        max_mixed_graph_rows: int,
    ) -> None:
        self._device = device
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sampler = sampler
        self._lora = lora
        self._inputs = inputs
        self._staging = staging
        self._stats = stats
        self._num_seats = num_seats
        self._graphs: GraphCache[_Decode] | None = None
        self._mixed_graphs: GraphCache[Pieces] | None = None
        if max_graphs:
            self._graphs = GraphCache(num_seats, max_graphs)
            self._mixed_graphs = GraphCache(num_seats, -(-max_graphs // 2))
            self._pieces = PiecewiseForward(device, model, pool.data, max_mixed_graph_rows)
        self.lets_stand_in = False
        self._outside: torch.Tensor | None = None  # logits for `sample_outside`, made when a decode step first needs it

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows of the decode steps that can be captured, ascending; none if graphs are off."""
        return () if self._graphs is None else self._graphs.capacities

    @property
    def mixed_graph_rows(self) -> int:
        """Rows of the steps with prompts that can run in pieces, at most; 0 if graphs are off."""
        return 0 if self._mixed_graphs is None else self._pieces.max_rows

    def count_captures(self) -> None:
        """Bring the totals of captures up to date."""
        graphs = [cache for cache in (self._graphs, self._mixed_graphs) if cache is not None]
        self._stats.num_captures = sum(cache.num_captures for cache in graphs)
        self._stats.capture_seconds = sum(cache.capture_seconds for cache in graphs)

    def compute(self, plan: StepPlan) -> Sampled:
        """Enqueue a step with rows."""
        self._stats.num_steps += 1
        self._stats.num_mixed_steps += bool(plan.chunks)
        return self._mixed(plan) if self._graphs is None or plan.chunks else self._decode(plan, self._graphs)

    def send(self) -> None:
        """Enqueue the copy of all that has been staged, and the changes of the table of pages."""
        changes = self._inputs.take_table_changes(self._staging)
        self._staging.send()
        self._inputs.apply_table_changes(changes)

    def _decode(self, plan: StepPlan, graphs: GraphCache[_Decode]) -> Sampled:
        num_rows = len(plan.decode)
        capacity = graphs.capacity(num_rows)
        rows = self._inputs.decode_rows(plan, capacity, self._num_seats, self._staging)
        kind = self._sampler.kind(plan.decode)
        lora = self._lora_for(graphs, rows.segments, lambda work: (capacity, work, kind))
        self._sampler.flush()
        self.send()
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
            forward = self._kernel_by_kernel
            result = run()
        else:
            captured.graph.replay()
            result = captured.result
            self._stats.num_graph_steps += 1
        if kind is SamplingKind.OUTSIDE:
            return None, self._sampler.sample_outside(result[:num_rows], plan.decode, rows.seats[:num_rows])
        return result[:num_rows], None

    def _kernel_by_kernel(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
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

    def _mixed(self, plan: StepPlan) -> Sampled:
        rows = self._inputs.rows(plan, self._staging)
        graphs = self._mixed_graphs if plan.num_tokens <= self.mixed_graph_rows else None
        capacity = 0 if graphs is None else self._pieces.capacity(plan.num_tokens)
        if graphs is None:
            lora = self._lora.plan(rows.segments, graph=False)
        else:
            lora = self._lora_for(graphs, rows.segments, lambda work: ("pieces", capacity, work))
        kind = self._sampler.kind(plan.sampled_seats)
        self._sampler.flush()
        self.send()
        attention = self._attention.prepare(rows.device)
        if lora is not None:
            lora.upload()
        work = None if lora is None else lora.work
        token_ids = self._token_ids(rows)
        if graphs is not None:

            def run(pieces: Pieces) -> torch.Tensor:
                return self._pieces.run(pieces, token_ids, rows.device.positions, attention, rows.sampled)

            logits = self._with_memory(
                lambda: run(self._pieces_of(graphs, capacity, lora)),
                lambda: run(self._pieces.uncaptured(capacity, work)),
            )
        else:
            logits = self._kernel_by_kernel(
                Batch(token_ids, rows.device.positions, attention, rows.sampled, work), self._pool.data
            )
        if not plan.sampled_seats:
            return None, None
        if kind is SamplingKind.OUTSIDE:
            return None, self._sampler.sample_outside(logits, plan.sampled_seats, rows.sampled_seats)
        return self._sampler.choose(logits, rows.sampled_seats, kind), None

    def _pieces_of(self, graphs: GraphCache[Pieces], capacity: int, lora: LoraStep | None) -> Pieces:
        key = ("pieces", capacity, _lora_key(lora))
        work = None if lora is None else lora.work
        captured = graphs.find(key)
        if captured is None and graphs.is_due(key):
            captured = graphs.keep(key, lambda: self._pieces.capture(capacity, work))
        if captured is None:
            return self._pieces.uncaptured(capacity, work)
        self._stats.num_piecewise_steps += 1
        return captured

    def _lora_for(
        self, graphs: GraphCache[Captured], segments: Segments, key_of: Callable[[Hashable], Key]
    ) -> LoraStep | None:
        """The LoRA of a step that replays a graph, if there is one: that with which one was captured, if it will do."""
        lora = self._lora.plan(segments, graph=True)
        if lora is None or not self.lets_stand_in or key_of(lora.key) in graphs:
            return lora
        found = self._lora.stand_in(segments, lambda work: key_of(work) in graphs)
        if found is None or not graphs.does_without(key_of(lora.key), found[1]):
            return lora
        self._stats.num_stand_ins += 1
        return found[0]

    def _token_ids(self, rows: Rows) -> torch.Tensor:
        last = self._sampler.last_token.index_select(0, rows.seats[: rows.device.num_decode])
        return last if rows.chunk_tokens is None else torch.cat([last, rows.chunk_tokens])


def _lora_key(lora: LoraStep | None) -> Hashable:
    return None if lora is None else lora.key
