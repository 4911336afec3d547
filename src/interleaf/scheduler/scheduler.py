"""Plans steps and takes in what they sampled. Owns every sequence; never touches a tensor or a clock.

Plan k+1 may be asked for before the tokens of step k are committed. Whatever is certain is planned exactly (lengths,
pages, ends by max_tokens); only an end by token is learnt late, and costs one row whose token is thrown away.

What a decoding sequence will need, and when, is known when it starts to decode: it is entered in a calendar, so that
planning a steady step looks at nobody.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from interleaf.adapters.residency import Residency
from interleaf.core import (
    AdapterLoad,
    AdapterUid,
    Chunk,
    Event,
    FinishReason,
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
from interleaf.memory.prefix import PrefixCache
from interleaf.scheduler.admission import Admission
from interleaf.scheduler.calendar import Calendar
from interleaf.scheduler.loads import HostImages, LoadLimits, Loads, Sent
from interleaf.scheduler.policy import Policy
from interleaf.scheduler.preemption import Preemption
from interleaf.scheduler.queue import Standing, WaitingQueue
from interleaf.scheduler.seats import Seats
from interleaf.scheduler.sequence import Sequence, SequenceState, WaitReason

_REASONS = {
    Standing.FETCHING: WaitReason.ADAPTER_FETCH,
    Standing.ASKED: WaitReason.ADAPTER_FETCH,
    Standing.LOADING: WaitReason.ADAPTER_LOAD,
}


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
    now_s: float
    load: list[AdapterLoad] = field(default_factory=list)
    start: list[SeatStart] = field(default_factory=list)
    grow: list[SeatGrow] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Iteration-level batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).

    First come, first served among the sequences that could start; one whose adapter is on its way is skipped, one that
    waits for pages is not overtaken. When the pool runs dry, idle adapters and prefixes leave first, then the sequence
    that arrived last loses its seat and is recomputed later.

    Args:
        refill_seats: while sequences decode, nobody starts until so many seats are free. Prompts are then computed in
            groups, and most steps are pure decode steps, which a device can replay as a graph. With more seats free
            than that - at low load - a prompt is computed at once.
        loads: how adapters are sent for.
        prefixes: shares pages between sequences that begin alike; None: no two sequences share any.
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
        refill_seats: int = 1,
        loads: LoadLimits | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        assert 1 <= refill_seats <= max_num_seqs, f"refill_seats={refill_seats} of {max_num_seqs} seats"
        self._geometry = geometry
        self._allocator = allocator
        self._residency = residency
        self._admission = admission
        self._preemption = preemption
        self._prefixes = prefixes
        self._max_batch_tokens = max_batch_tokens
        self._refill_seats = refill_seats
        self._group_is_cut = False
        self._waiting = WaitingQueue(policy)
        self._seats = Seats(max_num_seqs)
        self._loads = Loads(
            residency,
            images,
            self._waiting,
            loads or LoadLimits(),
            horizon=max_num_seqs,
            num_pages=allocator.num_pages,
            fail=self._fail_waiting,
            can_spare=self._can_spare,
        )
        self._open: dict[str, _Open] = {}
        self._in_flight: deque[tuple[StepPlan, tuple[Sequence, ...]]] = deque()
        self._growth: Calendar[Sequence] = Calendar()
        self._last_rows: Calendar[Sequence] = Calendar()
        self._evicted: list[AdapterUid] = []
        self._events: list[Event] = []
        self._num_arrived = 0
        self._num_steps = 0
        # Of the last plan: why nobody else was started, why no other adapter was sent for, and how many were passed
        # over for reasons of their own.
        self._closed_by: WaitReason | None = None
        self._unsent_by = WaitReason.QUEUED
        self._passed_over: Counter[WaitReason] = Counter()
        self._refused: tuple[Sequence, int, int] | None = None
        self.num_preemptions = 0

    # ------------------------------------------------------------------ requests in, events out

    def add(self, request: Request, stop_ids: frozenset[int], seed: int) -> None:
        """Accept a request; sequence i of it draws from seed + i."""
        assert request.id not in self._open, f"request {request.id} is open already"
        if request.adapter is not None:
            self._residency.count_use(request.adapter)
        sequences = []
        for index in range(request.params.n):
            seq = Sequence(request, index, seed + index, self._num_arrived, stop_ids)
            self._num_arrived += 1
            sequences.append(seq)
            self._wait(seq)
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
        line = self._waiting.waiting_for(uid)
        for seq in line if self._loads.is_demanded(uid) else line[: self._seats.num_free]:
            self._count_lookup(seq)  # it has waited for this load
        self._loads.ended(uid, error)

    def forget_adapter(self, uid: AdapterUid) -> None:
        """An adapter was withdrawn and no request refers to it: it leaves the pool, and so do its prefixes."""
        self._residency.remove(uid)
        if self._prefixes is not None:
            self._prefixes.drop(uid)

    # ------------------------------------------------------------------ plan

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step, or None when there is nothing to compute or copy now.

        Args:
            now_s: by whatever clock; only the time limit of loads asks for it.
        """
        step = self._num_steps
        draft = _Draft(self._max_batch_tokens, now_s)
        self._grow_decoding(draft)
        decode, decode_rows = self._seats.decode_rows
        draft.budget -= len(decode)
        for seq in self._seats.prefilling:
            self._add_chunk(draft, seq)
        self._admit(draft)
        if not (decode or draft.chunks or draft.load):
            return None

        rows = decode_rows
        if draft.sampling:
            rows = (*decode_rows, *draft.sampling)
            for seq in draft.sampling:
                self._start_decoding(seq)
        for seq in self._last_rows.take(step):
            self._seats.start_draining(seq)
        self._note_evicted()
        evicted, self._evicted = tuple(self._evicted), []
        plan = StepPlan(
            step=step,
            vacate=self._seats.take_vacated(),
            evict=evicted,
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
        for seq in sorted(self._growth.take(self._num_steps), key=lambda seq: seq.order):
            if seq.state is not SequenceState.DECODE:
                continue  # lost its seat to an older one just now
            while not self._make_room(1, None):
                victim = self._preemption.victim(self._seats)  # never one that has grown: those are ahead of `seq`
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                pages = self._allocator.alloc(1, seq.owner)
                seq.pages.extend(pages)
                draft.grow.append(SeatGrow(seq.seat, pages))
                self._enter_growth(seq)

    def _start_decoding(self, seq: Sequence) -> None:
        """The known tokens of a sequence are planned: enter what comes in the calendar."""
        self._seats.start_decoding(seq)
        seq.first_decode_step = self._num_steps + 1
        seq.last_step = self._num_steps + seq.max_tokens - 1 - seq.num_known
        self._last_rows.enter(seq.last_step, seq)
        self._enter_growth(seq)

    def _enter_growth(self, seq: Sequence) -> None:
        seq.grow_step = seq.first_decode_step + len(seq.pages) * self._geometry.page_tokens - seq.num_known
        if seq.grow_step <= seq.last_step:
            self._growth.enter(seq.grow_step, seq)

    def _add_chunk(self, draft: _Draft, seq: Sequence) -> None:
        count = min(draft.budget, seq.num_known - seq.num_prefilled)
        if count == 0:
            return
        first, stop = seq.num_prefilled, seq.num_prefilled + count
        seq.num_prefilled = stop
        samples = stop == seq.num_known
        draft.chunks.append(Chunk(seq.seat, first, count, samples))
        draft.budget -= count
        if samples:
            draft.sampling.append(seq)
        if seq.prefix:
            size = self._geometry.page_tokens
            PrefixCache.computed(seq.prefix[first // size : stop // size], self._num_steps)

    # ------------------------------------------------------------------ admission

    def _admit(self, draft: _Draft) -> None:
        """Seat waiting sequences in order, and send for the adapters of those in reach of a seat.

        An adapter that a sequence further ahead waits for is not evicted for one behind; one that only sequences behind
        wait for is. So the first in line can always be served in the end.
        """
        self._closed_by = None
        self._passed_over.clear()
        self._loads.begin_plan(draft.now_s)
        if not len(self._waiting):
            self._group_is_cut = False
            return
        closed = WaitReason.SEATS if self._holds_back() else None
        self._group_is_cut = False
        seats = self._seats.num_free
        limits = self._loads.limits
        demand = min(limits.max_loads, seats)
        most = min(limits.max_loads, seats + limits.prefetch_loads)
        may_send = True
        while True:
            if closed is None and seats == 0:
                closed = WaitReason.SEATS
            may_send = may_send and self._loads.num_under_way < most
            standings = [Standing.FETCHING]  # on their way already: whether they have arrived is asked in any case
            if may_send:
                standings.append(Standing.COLD)
            if closed is None:
                standings.append(Standing.READY)
            seq = self._waiting.first(*standings)
            if seq is None:
                break
            if seq.adapter is not None and (standing := self._waiting.standing(seq.adapter)) is not Standing.READY:
                is_ahead = self._loads.num_under_way - (standing is Standing.FETCHING) >= demand
                if is_ahead and not self._loads.may_look_ahead_to(seq):
                    may_send = False  # too far behind
                    if standing is Standing.FETCHING:
                        self._waiting.move(seq.adapter, Standing.ASKED)
                    continue
                sent = self._send_for(draft, seq, seq.adapter, is_ahead)
                if sent is Sent.NO_PAGES:
                    if not is_ahead:
                        closed = WaitReason.PAGES
                        break
                    may_send = False
                continue
            if seq.resume_step > self._num_committed:
                wait: WaitReason | None = WaitReason.LAST_TOKEN
            elif draft.budget == 0:
                closed, self._group_is_cut = WaitReason.TOKEN_BUDGET, True
                continue
            else:
                wait = self._try_to_start(draft, seq)
            if wait is WaitReason.PAGES:
                closed = wait
                break
            if wait is not None:
                self._waiting.pass_over(seq)
                self._passed_over[wait] += 1
            seats -= 1
        self._closed_by = closed
        if closed is WaitReason.PAGES:
            self._unsent_by = closed
        else:
            is_full = self._loads.num_under_way >= limits.max_loads
            self._unsent_by = WaitReason.LOAD_LIMIT if is_full else WaitReason.SEATS
        self._waiting.end_pass()

    @property
    def _num_committed(self) -> int:
        return self._num_steps - len(self._in_flight)

    def _holds_back(self) -> bool:
        """Whether too few seats are free to start anybody. A group that the token budget has cut is started whole.

        A draining sequence gives its seat back with the next commit, so it counts neither as decoding nor as a reason
        to start without it.
        """
        free = self._seats.num_free
        return 0 < free < self._refill_seats and bool(self._seats.decode_rows[0]) and not self._group_is_cut

    def _send_for(self, draft: _Draft, seq: Sequence, uid: AdapterUid, is_ahead: bool) -> Sent:
        """See to it that an adapter comes to the pool.

        Args:
            is_ahead: nobody who waits for it has a seat to take yet. Then as many pages are left free as there are
                sequences that may need one any moment.
        """
        if not is_ahead:
            self._count_lookup(seq)
        sent, load = self._loads.send_for(seq, uid, draft.now_s, len(self._seats) if is_ahead else None)
        self._note_evicted()
        if load is not None:
            draft.load.append(load)
        return sent

    def _count_lookup(self, seq: Sequence) -> None:
        if not seq.considered and seq.adapter is not None:
            seq.considered = True
            self._residency.count_lookup(seq.adapter)

    def _try_to_start(self, draft: _Draft, seq: Sequence) -> WaitReason | None:
        """Seat a sequence whose adapter is in the pool. Returns: why it has to wait; None if it has started."""
        self._count_lookup(seq)
        if self._prefixes is not None:
            chain, goes_on = self._prefixes.find(seq.root, seq.token_ids, self._num_steps)
            if goes_on:
                return WaitReason.PREFIX
            self._prefixes.acquire(chain)
            seq.prefix = chain
        # Pinned first: pages for the sequence must not be those of its own adapter.
        if seq.adapter is not None:
            self._residency.pin(seq.adapter)
        num_pages = self._geometry.pages_for_tokens(len(seq.token_ids) + 1) - len(seq.prefix)
        if self._may_fit(seq) and self._make_room(num_pages, seq):
            self._start(draft, seq)
            return None
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)
        if self._prefixes is not None:
            self._prefixes.release(seq.prefix)
            seq.prefix = []
        return WaitReason.PAGES

    def _start(self, draft: _Draft, seq: Sequence) -> None:
        self._stop_waiting(seq)
        self._seats.sit(seq)
        num_tokens = seq.num_known = len(seq.token_ids)
        num_cached = seq.num_prefilled = len(seq.prefix) * self._geometry.page_tokens
        shared = [page.page for page in seq.prefix]
        own = self._allocator.alloc(self._geometry.pages_for_tokens(num_tokens) - len(shared), seq.owner)
        seq.pages = [*shared, *own]
        if self._prefixes is not None:
            seq.prefix += self._prefixes.claim(seq.root, seq.prefix, seq.token_ids, seq.pages, seq.owner)
            self._prefixes.counts.hit_tokens += num_cached
            self._prefixes.counts.computed_tokens += num_tokens - num_cached
        self._admission.started(seq, self._num_steps, self._geometry)
        start = SeatStart(
            seat=seq.seat,
            adapter=seq.adapter,
            token_ids=tuple(seq.token_ids),
            prompt_tokens=seq.prompt_tokens,
            params=seq.request.params,
            seed=seq.seed,
            pages=tuple(seq.pages),
            stop_ids=tuple(sorted(seq.stop_ids)),
            num_cached=num_cached,
        )
        draft.start.append(start)
        self._add_chunk(draft, seq)

    def _may_fit(self, seq: Sequence) -> bool:
        """Whether the running sequences and this one are expected to find their pages till they end.

        A sequence that is refused is refused until somebody leaves or an adapter does: time alone frees no page.
        """
        room = self._num_spare_pages
        if self._refused == (seq, self._seats.num_left, room):
            return False
        is_alone = not len(self._seats) and not self._loads.num_copies
        if is_alone or self._admission.peak_pages(seq, self._num_steps, self._geometry) <= room:
            return True
        self._refused = (seq, self._seats.num_left, room)
        return False

    def _can_spare(self, num_pages: int) -> bool:
        """Whether the running sequences are expected to do without so many pages till they end."""
        return (
            not len(self._seats)
            or self._admission.peak_pages(None, self._num_steps, self._geometry) <= self._num_spare_pages - num_pages
        )

    @property
    def _num_spare_pages(self) -> int:
        """Pages for what sequences keep to themselves, if all that is idle were evicted."""
        shared = 0 if self._prefixes is None else self._prefixes.num_used_pages
        return self._allocator.num_pages - self._residency.num_busy_pages - shared

    def _make_room(self, num_pages: int, seq: Sequence | None) -> bool:
        """Evict idle things until so many pages are free, for a sequence in line (None: for those that run)."""
        has_room = self._residency.make_room(num_pages, self._waiting.overtakable(seq))
        self._note_evicted()
        return has_room

    def _note_evicted(self) -> None:
        """Tell the queue and the next plan which adapters have left."""
        for uid in self._residency.take_evicted():
            self._evicted.append(uid)
            self._waiting.move(uid, self._loads.standing(uid))  # it may have been sent for again since

    def _wait(self, seq: Sequence) -> None:
        self._waiting.push(seq, Standing.READY if seq.adapter is None else self._loads.standing(seq.adapter))
        if seq.adapter is not None:
            self._residency.add_waiter(seq.adapter)

    def _stop_waiting(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        if seq.adapter is not None:
            self._residency.remove_waiter(seq.adapter)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's seat and pages away; it will be computed again from its tokens."""
        self._unseat(seq, SequenceState.WAITING)
        seq.resume_step = self._num_steps
        self.num_preemptions += 1
        self._wait(seq)

    # ------------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step sampled. Plans are committed in the order they were made."""
        planned, rows = self._in_flight.popleft()
        assert planned is plan, f"step {plan.step} committed before step {planned.step}"
        ended = SequenceState.ENDED
        add_event = self._events.append
        logprobs = result.logprobs or (None,) * len(rows)
        for seq, token, token_logprobs in zip(rows, result.token_ids, logprobs, strict=True):
            if seq.state is ended:
                continue  # the one token in excess
            token_ids = seq.token_ids
            token_ids.append(token)
            if token in seq.stop_ids or len(token_ids) == seq.max_tokens:
                reason = seq.finish_reason()
                stop_token = token if reason is FinishReason.STOP else None
                add_event(TokenEvent(seq.request_id, seq.index, token, token_logprobs, reason, stop_token))
                self._admission.ended(seq)
                self._end(seq)
            else:
                add_event(TokenEvent(seq.request_id, seq.index, token, token_logprobs))

    # ------------------------------------------------------------------ ends

    def _unseat(self, seq: Sequence, state: SequenceState) -> None:
        if seq.state is SequenceState.DECODE:
            self._growth.strike(seq.grow_step, seq)
            self._last_rows.strike(seq.last_step, seq)
        self._admission.left(seq)
        own = seq.pages
        if self._prefixes is not None:
            num_computed = seq.num_computed(self._num_steps)
            own = self._prefixes.leave(
                seq.root, seq.prefix, seq.token_ids, num_computed, seq.pages, seq.owner, self._num_steps
            )
            seq.prefix = []
        self._seats.leave(seq, state)
        self._allocator.free(own, seq.owner)
        seq.pages = []
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)

    def _drop(self, seq: Sequence) -> None:
        """A sequence is over, wherever it stands."""
        if seq.is_seated:
            self._unseat(seq, SequenceState.ENDED)
        elif seq.state is SequenceState.WAITING:
            self._stop_waiting(seq)
            seq.state = SequenceState.ENDED

    def _end(self, seq: Sequence) -> None:
        self._drop(seq)
        entry = self._open[seq.request_id]
        entry.num_open -= 1
        if entry.num_open == 0:
            self._close(entry, RequestFinished(seq.request_id))

    def _close(self, entry: _Open, terminal: RequestFinished | RequestAborted | RequestFailed) -> None:
        del self._open[entry.request.id]
        for seq in entry.sequences:
            self._drop(seq)
        self._events.append(terminal)

    def _fail_waiting(self, uid: AdapterUid, reason: str) -> None:
        """Fail the requests that wait for an adapter which cannot be had."""
        for seq in self._waiting.waiting_for(uid):
            if seq.request_id in self._open:
                self._close(self._open[seq.request_id], RequestFailed(seq.request_id, reason))

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
        """How many sequences wait, and for what, as of the last plan."""
        reasons = Counter(self._passed_over)
        for standing, count in self._waiting.sizes().items():
            if standing is Standing.READY:
                reasons[self._closed_by or WaitReason.QUEUED] += count - self._passed_over.total()
            elif standing is Standing.COLD:
                reasons[self._unsent_by] += count
            else:
                reasons[_REASONS[standing]] += count
        return +reasons
