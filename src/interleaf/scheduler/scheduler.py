"""Plans steps and takes in what they sampled. Owns every sequence; never touches a tensor or a clock.

Plan k+1 may be asked for before the tokens of step k are committed. Whatever is certain is planned exactly (lengths,
pages, ends by max_tokens); only an end by token is learnt late, and costs one row whose token is thrown away.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from interleaf.adapters.residency import AdapterState, Residency
from interleaf.core import (
    AdapterLoad,
    AdapterUid,
    Chunk,
    Event,
    FinishReason,
    HostState,
    PooledLayout,
    Request,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SeatGrow,
    SeatStart,
    StepPlan,
    StepResult,
    TokenEvent,
)
from interleaf.memory.allocator import PageAllocator
from interleaf.memory.geometry import PageGeometry
from interleaf.scheduler.admission import Admission
from interleaf.scheduler.policy import Policy
from interleaf.scheduler.preemption import Preemption
from interleaf.scheduler.queue import WaitingQueue
from interleaf.scheduler.seats import Seats
from interleaf.scheduler.sequence import Sequence, SequenceState, WaitReason


class HostImages(Protocol):
    """What the scheduler asks of the host tier (`adapters/store.py`)."""

    def layout(self, uid: AdapterUid) -> PooledLayout:
        """Where everything of a registered adapter lies."""

    def prepare(self, uid: AdapterUid) -> HostState:
        """Whether the image is in host memory; if not, it is being fetched from now on."""

    def failure(self, uid: AdapterUid) -> str:
        """Why the last fetch failed."""

    def pin(self, uid: AdapterUid) -> None:
        """Keep the image in host memory: it is being copied to the pool."""

    def unpin(self, uid: AdapterUid) -> None:
        """The copy is over."""


@dataclass(slots=True)
class _Open:
    """A request that has not had its terminal event."""

    request: Request
    sequences: list[Sequence]
    num_open: int


@dataclass(slots=True)
class _Draft:
    """What a plan has gathered so far."""

    budget: int
    load: list[AdapterLoad]
    start: list[SeatStart]
    grow: list[SeatGrow]
    chunks: list[Chunk]
    chunk_rows: list[Sequence]


class Scheduler:
    """Iteration-level batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).

    First come, first served among the sequences that could start; one whose adapter is on its way is skipped, one that
    waits for pages is not overtaken. When the pool runs dry, idle adapters leave first, then the sequence that arrived
    last loses its seat and is recomputed later.
    """

    def __init__(
        self,
        *,
        geometry: PageGeometry,
        allocator: PageAllocator,
        residency: Residency,
        images: HostImages,
        policy: Policy,
        admission: Admission,
        preemption: Preemption,
        max_batch_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._geometry = geometry
        self._allocator = allocator
        self._residency = residency
        self._images = images
        self._admission = admission
        self._preemption = preemption
        self._max_batch_tokens = max_batch_tokens
        self._waiting = WaitingQueue(policy)
        self._seats = Seats(max_num_seqs)
        self._open: dict[str, _Open] = {}
        self._in_flight: deque[tuple[StepPlan, tuple[Sequence, ...]]] = deque()
        self._events: list[Event] = []
        self._num_arrived = 0
        self._num_steps = 0
        self.num_preemptions = 0

    # ------------------------------------------------------------------ requests in, events out

    def add(self, request: Request, stop_ids: frozenset[int], seed: int) -> None:
        """Accept a request; sequence i of it draws from seed + i."""
        assert request.id not in self._open, f"request {request.id} is open already"
        sequences = []
        for index in range(request.params.n):
            seq = Sequence(request, index, seed + index, self._num_arrived, stop_ids, list(request.prompt_token_ids))
            self._num_arrived += 1
            sequences.append(seq)
            self._waiting.push(seq)
        self._open[request.id] = _Open(request, sequences, len(sequences))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it; what has ended already is left alone."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        if index is not None:
            if index < len(entry.sequences) and entry.sequences[index].state is not SequenceState.ENDED:
                self._end(entry.sequences[index])
            return
        self._close(entry, RequestAborted(request_id))

    def fail_all(self, reason: str) -> None:
        """End every request: the steps that would have served them cannot run."""
        self._in_flight.clear()
        for entry in list(self._open.values()):
            self._close(entry, RequestFailed(entry.request.id, reason))

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def load_done(self, uid: AdapterUid, error: str | None) -> None:
        """The runner reports a copy as ordered before all later steps, or as failed."""
        self._images.unpin(uid)
        if error is None:
            self._residency.finish_load(uid)
        else:
            self._residency.fail_load(uid)
            self._fail_waiting(uid, error)

    # ------------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute or copy now."""
        draft = _Draft(self._max_batch_tokens, [], [], [], [], [])
        self._grow_decoding(draft)
        decode, decode_rows = self._seats.decode_rows
        draft.budget -= len(decode)
        for seq in self._seats.prefilling:
            self._add_chunk(draft, seq)
        self._admit(draft)
        if not (decode or draft.chunks or draft.load):
            return None

        sampling = [seq for seq, chunk in zip(draft.chunk_rows, draft.chunks, strict=True) if chunk.samples]
        for seq in decode_rows:
            seq.num_computed += 1
        for seq in sampling:
            self._seats.start_decoding(seq)
        rows = (*decode_rows, *sampling)
        for seq in rows:
            seq.num_planned += 1
            seq.num_in_flight += 1
            if seq.num_planned == seq.request.params.max_tokens:
                self._seats.start_draining(seq)

        plan = StepPlan(
            step=self._num_steps,
            vacate=self._seats.take_vacated(),
            evict=self._residency.take_evicted(),
            load=tuple(draft.load),
            start=tuple(draft.start),
            grow=tuple(draft.grow),
            chunks=tuple(draft.chunks),
            decode=decode,
        )
        self._num_steps += 1
        self._in_flight.append((plan, rows))
        return plan

    def _grow_decoding(self, draft: _Draft) -> None:
        """Give a page to every decoding sequence whose pages are full, the oldest first."""
        page_tokens = self._geometry.page_tokens
        full = [seq for seq in self._seats.decode_rows[1] if seq.num_computed == len(seq.pages) * page_tokens]
        for seq in sorted(full, key=lambda seq: seq.order):
            if seq.state is not SequenceState.DECODE:
                continue  # lost its seat to an older one just now
            while not self._residency.make_room(1):
                victim = self._preemption.victim(self._seats)  # never one that has grown: those are ahead of `seq`
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                pages = self._allocator.alloc(1, seq.owner)
                seq.pages.extend(pages)
                draft.grow.append(SeatGrow(seq.seat, pages))

    def _add_chunk(self, draft: _Draft, seq: Sequence) -> None:
        count = min(draft.budget, len(seq.token_ids) - seq.num_computed)
        if count == 0:
            return
        first, seq.num_computed = seq.num_computed, seq.num_computed + count
        draft.chunks.append(Chunk(seq.seat, first, count, samples=seq.num_computed == len(seq.token_ids)))
        draft.chunk_rows.append(seq)
        draft.budget -= count

    def _admit(self, draft: _Draft) -> None:
        """Seat waiting sequences in order, and send for their adapters.

        An adapter that a sequence further ahead waits for is not evicted for one behind; one that only sequences behind
        wait for is. So the first in line can always be served in the end, and loads never outnumber the seats.
        """
        keep: set[AdapterUid] = set()
        seats = self._seats.num_free
        for seq in self._waiting:
            if seats == 0:
                seq.wait_reason = WaitReason.SEATS
                return
            seats -= 1
            if seq.adapter is not None:
                keep.add(seq.adapter)
            if seq.num_in_flight:
                seq.wait_reason = WaitReason.LAST_TOKEN
                continue
            if seq.adapter is not None:
                wait = self._send_for(draft, seq, seq.adapter, keep)
                if wait is not None:
                    seq.wait_reason = wait
                    if wait is WaitReason.PAGES:
                        return
                    continue
            if draft.budget == 0:
                seq.wait_reason = WaitReason.TOKEN_BUDGET
                continue
            needed = self._geometry.pages_for_tokens(self._admission.tokens_to_fit(seq))
            if not self._residency.make_room(needed, keep):
                seq.wait_reason = WaitReason.PAGES
                return
            self._start(draft, seq)

    def _send_for(self, draft: _Draft, seq: Sequence, uid: AdapterUid, keep: set[AdapterUid]) -> WaitReason | None:
        """See to it that an adapter is in the pool. Returns: why the sequence has to wait; None if it has not."""
        state = self._residency.state(uid)
        if not seq.considered:
            seq.considered = True
            self._residency.count_lookup(state)
        if state is AdapterState.RESIDENT:
            return None
        if state is AdapterState.LOADING:
            return WaitReason.ADAPTER_LOAD
        match self._images.prepare(uid):
            case HostState.FETCHING:
                return WaitReason.ADAPTER_FETCH
            case HostState.FAILED:
                self._fail_waiting(uid, self._images.failure(uid))
                return WaitReason.ADAPTER_FETCH
            case HostState.READY:
                num_pages = self._images.layout(uid).pages
                if not self._residency.make_room(num_pages, keep):
                    return WaitReason.PAGES
                self._images.pin(uid)
                draft.load.append(AdapterLoad(uid, self._residency.start_load(uid, num_pages)))
                return WaitReason.ADAPTER_LOAD

    def _start(self, draft: _Draft, seq: Sequence) -> None:
        self._waiting.remove(seq)
        self._seats.sit(seq)
        if seq.adapter is not None:
            self._residency.pin(seq.adapter)
        pages = self._allocator.alloc(self._geometry.pages_for_tokens(len(seq.token_ids)), seq.owner)
        seq.pages.extend(pages)
        start = SeatStart(
            seat=seq.seat,
            adapter=seq.adapter,
            token_ids=tuple(seq.token_ids),
            prompt_tokens=seq.prompt_tokens,
            params=seq.request.params,
            seed=seq.seed,
            pages=pages,
            stop_ids=tuple(sorted(seq.stop_ids)),
        )
        draft.start.append(start)
        self._add_chunk(draft, seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's seat and pages away; it will be computed again from its tokens."""
        self._unseat(seq, SequenceState.WAITING)
        seq.num_computed = 0
        self.num_preemptions += 1
        self._waiting.push(seq)

    # ------------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step sampled. Plans are committed in the order they were made."""
        planned, rows = self._in_flight.popleft()
        assert planned is plan, f"step {plan.step} committed before step {planned.step}"
        logprobs = result.logprobs or (None,) * len(rows)
        for seq, token, token_logprobs in zip(rows, result.token_ids, logprobs, strict=True):
            seq.num_in_flight -= 1
            if seq.state is SequenceState.ENDED:
                continue  # the one token in excess
            seq.token_ids.append(token)
            reason = seq.finish_reason()
            stop_token = token if reason is FinishReason.STOP else None
            self._events.append(TokenEvent(seq.request.id, seq.index, token, token_logprobs, reason, stop_token))
            if reason is not None:
                self._end(seq)

    # ------------------------------------------------------------------ ends

    def _unseat(self, seq: Sequence, state: SequenceState) -> None:
        self._seats.leave(seq, state)
        self._allocator.free(seq.pages, seq.owner)
        seq.pages.clear()
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)

    def _drop(self, seq: Sequence) -> None:
        """A sequence is over, wherever it stands."""
        if seq.is_seated:
            self._unseat(seq, SequenceState.ENDED)
        elif seq.state is SequenceState.WAITING:
            self._waiting.remove(seq)
            seq.state = SequenceState.ENDED

    def _end(self, seq: Sequence) -> None:
        self._drop(seq)
        entry = self._open[seq.request.id]
        entry.num_open -= 1
        if entry.num_open == 0:
            self._close(entry, RequestFinished(seq.request.id))

    def _close(self, entry: _Open, terminal: RequestFinished | RequestAborted | RequestFailed) -> None:
        del self._open[entry.request.id]
        for seq in entry.sequences:
            self._drop(seq)
        self._events.append(terminal)

    def _fail_waiting(self, uid: AdapterUid, reason: str) -> None:
        """Fail the requests that wait for an adapter which cannot be had."""
        for seq in list(self._waiting):
            if seq.adapter == uid and seq.request.id in self._open:
                self._close(self._open[seq.request.id], RequestFailed(seq.request.id, reason))

    # ------------------------------------------------------------------ what others may see

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def num_running(self) -> int:
        return len(self._seats)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting_by_reason(self) -> Counter[WaitReason]:
        """How many sequences wait, and for what."""
        return Counter(seq.wait_reason for seq in self._waiting)
