"""Runs made-up steps before the first request, so that none waits for a compiler or a capture. Knows plans, no request.

Kernels that were compiled before come from the caches of Triton and FlashInfer on disk. The steps use the pool's first
pages, which nobody owns yet, and all-zero adapters of a few shapes that decide which kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from interleaf.adapters.image import layout_of
from interleaf.core import AdapterUid, Chunk, Module, PooledLayout, SamplingParams, SeatStart, StepPlan, StreamOrder
from interleaf.engine.cuda.pieces import ROWS_STEP, SMALL_STEP_ROWS
from interleaf.engine.cuda.runner import CudaRunner
from interleaf.kernels.launch_shapes import CUT_RANKS
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard

_GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
_FILTERED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=4)
_RANKS = (16, 64)
"""Of adapters with which steps are made up."""
_ROWS_PER_ADAPTER = (1, 2, 4, 8, 16, 64, 10**9)
_COMMON_RANK = 16
"""Of the adapters for which steps of all sizes are captured: what most are trained with."""
_DECODING = 32
"""Rows that decode beside prompts with adapters, where there are as many seats for others."""
_PROMPT_TOKENS = 256
_SHORTEST_MODEL_LEN = 4


class WarmUp:
    """Made-up steps of one runner, which has run nothing yet."""

    def __init__(
        self,
        runner: CudaRunner,
        shard: Shard,
        geometry: PageGeometry,
        *,
        num_pages: int,
        num_seats: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self._runner = runner
        self._shard = shard
        self._geometry = geometry
        self._num_pages = num_pages
        self._num_seats = num_seats
        self._max_rows = max_rows
        self._max_model_len = max_model_len
        self._num_steps = 0
        self._seated: tuple[int, ...] = ()
        self._uids: list[AdapterUid] = []  # known at the moment

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Do everything; the runner is then as new, but for its graphs and kernels.

        Args: progress: called with (parts done, parts in all).
        """
        if self._max_model_len < _SHORTEST_MODEL_LEN:
            return self._runner.warmed_up()  # sequences so short that none of the steps below could be run
        parts = [*self._parts()]
        for done, part in enumerate(parts, start=1):
            part()
            if progress is not None:
                progress(done, len(parts))
        self._launch(StepPlan(self._num_steps, vacate=self._seated))
        self._runner.warmed_up()

    def _parts(self) -> Iterator[Callable[[], None]]:
        """Parts to be run in this order. Adapters are known to those between `_know` and `_forget` only, and to steps
        those of one rank at a time: what launches there are hangs on which ranks are in the pool.
        """
        yield self._runner.warm_sampler
        yield self._prefill
        capacities = self._runner.capacities
        for capacity in reversed(capacities):
            for params in (_GREEDY, _FILTERED):
                yield lambda n=capacity, p=params: self._decode(n, p)  # type: ignore[misc]
        most = min(self._runner.mixed_graph_rows, SMALL_STEP_ROWS)
        mixed = sorted({*range(ROWS_STEP, most, ROWS_STEP), most} - {0}, reverse=True)
        for rows in mixed:
            yield lambda n=rows: self._mixed(n, 0)  # type: ignore[misc]
        yield self._lora_kernels
        for rank in _RANKS:
            if not self._fits(rank):
                continue
            yield lambda r=rank: self._know(r, self._num_seats)  # type: ignore[misc]
            yield self._prefill
            for each in _ROWS_PER_ADAPTER:
                yield lambda e=each: self._decode(self._num_seats, _GREEDY, e)  # type: ignore[misc]
            if rank == _COMMON_RANK:
                for capacity in reversed(capacities):
                    yield lambda n=capacity: self._decode(n, _GREEDY)  # type: ignore[misc]
                for rows in mixed:
                    yield lambda n=rows: self._mixed(n, min(_DECODING, self._num_seats // 2, n - 1))  # type: ignore[misc]
            yield self._forget

    def _lora_kernels(self) -> None:
        """All kernels, for whatever adapters come: a rank that is met for the first time must hold up no step."""
        for rank in CUT_RANKS:
            if self._fits(rank):
                self._know(rank, 1)
        self._runner.warm_lora()
        self._forget()

    def _layout(self, rank: int) -> PooledLayout:
        ranks = {(layer, module): rank for layer in range(self._geometry.num_layers) for module in Module}
        return layout_of(ranks, self._shard, self._geometry, StreamOrder.TILES)

    def _fits(self, rank: int) -> bool:
        return self._layout(rank).pages <= self._num_pages

    def _know(self, rank: int, count: int) -> None:
        """So many adapters of that rank, in all modules. They share pages, all of zeros."""
        layout = self._layout(rank)
        uids = [AdapterUid(f"warm-up {rank} {i}") for i in range(count)]
        self._runner.know_adapters(dict.fromkeys(uids, (layout, range(layout.pages))))
        self._uids += uids

    def _forget(self) -> None:
        self._runner.forget_adapters(self._uids)
        self._uids = []

    def _of_rows(self, count: int, each: int) -> list[AdapterUid | None]:
        """Adapters of so many sequences, as many having one as `each`; none if none are known."""
        return [self._uids[i // each] if self._uids else None for i in range(count)]

    def _prefill(self) -> None:
        """One step as large as steps may be, which also takes the memory that such a step needs."""
        length = min(_PROMPT_TOKENS, self._max_model_len - 1, self._max_rows)
        count = max(1, min(self._num_seats, self._max_rows // length))
        self._start(count, length, self._of_rows(count, 2), _GREEDY)

    def _mixed(self, rows: int, decoding: int) -> None:
        """Twice a step of so many rows, prompts and those that decode: once launched kernel by kernel, once in pieces.

        Every sequence has an adapter of its own.
        """
        tokens = rows - decoding
        count = -(-tokens // (self._max_model_len - 1))
        if decoding + count > self._num_seats:
            return
        adapters = self._of_rows(decoding + count, 1)
        for _ in range(2):
            if decoding:
                self._start(decoding, 1, adapters, _GREEDY)
            self._start(count, tokens // count, adapters, _GREEDY, beside=decoding)

    def _decode(self, count: int, params: SamplingParams, each: int = 1) -> None:
        """Twice the same decode step: once launched kernel by kernel, once captured and replayed."""
        self._start(count, 1, self._of_rows(count, each), params)
        for _ in range(2):
            self._launch(StepPlan(self._num_steps, decode=tuple(range(count))))

    def _start(
        self,
        count: int,
        length: int,
        adapters: Sequence[AdapterUid | None],
        params: SamplingParams,
        beside: int = 0,
    ) -> None:
        """A step with so many prompts.   Args: beside: those on the first seats stay, and decode in it."""
        pages = (0,) * self._geometry.pages_for_tokens(length + 2)
        seats = range(beside, beside + count)
        starts = tuple(
            SeatStart(seat, adapters[seat], (0,) * length, length, params, seat, pages, ()) for seat in seats
        )
        chunks = tuple(Chunk(seat, 0, length, samples=True) for seat in seats)
        decode = self._seated[:beside]
        self._launch(
            StepPlan(self._num_steps, vacate=self._seated[beside:], start=starts, decode=decode, chunks=chunks)
        )
        self._seated = (*decode, *seats)

    def _launch(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._runner.launch(plan).result()
