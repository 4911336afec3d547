"""Plans steps and takes in what they sampled. Owns every sequence; never touches a tensor or a clock.

Plan k+1 may be asked for before the tokens of step k are committed. Whatever is certain is planned exactly (lengths,
pages, ends by max_tokens); only an end by token is learnt late, and costs one row whose token is thrown away.

What a decoding sequence will need, and when, is known when it starts to decode: it is entered in a calendar, so that
planning a steady step looks at nobody.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from interleaf.adapters.residency import Residency
from interleaf.core import (
    AdapterUid,
    Event,
    FinishReason,
    Request,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestWaiting,
    SeatGrow,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from interleaf.memory.allocator import PageAllocator
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.prefix import PrefixCache
from interleaf.memory.regions import SequenceRegion
from interleaf.memory.swap import SwapSpace
from interleaf.scheduler.admission import Admission
from interleaf.scheduler.calendar import Calendar
from interleaf.scheduler.draft import Draft
from interleaf.scheduler.entrance import Entrance
from interleaf.scheduler.loads import HostImages, LoadLimits
from interleaf.scheduler.open_request import OpenRequest
from interleaf.scheduler.pages import ResumeCounts, SequencePages
from interleaf.scheduler.policy import Policy
from interleaf.scheduler.preemption import Preemption
from interleaf.scheduler.seats import Seats
from interleaf.scheduler.sequence import Sequence, SequenceState, WaitReason
from interleaf.scheduler.waits import LongWaits


class Scheduler:
    """Iteration-level batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).

    First come, first served among the sequences that could start; one whose adapter is on its way is skipped, one that
    waits for pages is not overtaken. When the pool runs dry, idle adapters and prefixes leave first, then the sequence
    that arrived last loses its seat; what it has computed stays until its pages are wanted, and leaves in the order of
    all that is idle.

    Args:
        refill_seats: while sequences decode, nobody starts until so many seats are free. Prompts are then computed in
            groups, and most steps are pure decode steps, which a device can replay as a graph. With more seats free
            than that - at low load - a prompt is computed at once.
        loads: how adapters are sent for.
        prefixes: shares pages between sequences that begin alike; None: no two sequences share any.
        swap: host memory for pages of preempted sequences; None: none.
        region: the pages of `allocator`, if no adapter may use them: then the residency has an allocator of its own.
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
        swap: SwapSpace | None = None,
        region: SequenceRegion | None = None,
    ) -> None:
        assert 1 <= refill_seats <= max_num_seqs, f"refill_seats={refill_seats} of {max_num_seqs} seats"
        self._page_tokens = geometry.page_tokens
        self._max_batch_tokens = max_batch_tokens
        self._residency = residency
        self._prefixes = prefixes
        self._admission = admission
        self._preemption = preemption
        self._seats = Seats(max_num_seqs)
        self.swap = swap or SwapSpace(0, geometry.page_tokens, lambda: residency.reclaimer.policy.costs)
        self._pages = SequencePages(geometry, allocator, residency, admission, prefixes, self.swap, region)
        self._entrance = Entrance(
            policy=policy,
            seats=self._seats,
            pages=self._pages,
            residency=residency,
            images=images,
            limits=loads or LoadLimits(),
            refill_seats=refill_seats,
            fail=self._fail_waiting,
        )
        self._open: dict[str, OpenRequest] = {}
        self._in_flight: deque[tuple[StepPlan, tuple[Sequence, ...]]] = deque()
        self._growth: Calendar[Sequence] = Calendar()
        self._last_rows: Calendar[Sequence] = Calendar()
        self._events: list[Event] = []
        self._long_waits: LongWaits | None = None
        self._num_arrived = 0
        self._num_steps = 0
        self.num_preemptions = 0
        self.num_output_tokens = 0

    def tell_long_waits(self, after_s: float) -> None:
        """From now on a RequestWaiting tells, once, of each request that has had no seat for so many seconds."""
        self._long_waits = LongWaits(after_s)

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
            self._entrance.push(seq)
        if self._long_waits is not None:
            self._long_waits.arrived(sequences[0])
        self._open[request.id] = OpenRequest(request, sequences, len(sequences))

    def at(self, now_s: float) -> None:
        """So late it is now: whoever ceases to wait before the next plan has waited till then."""
        self._entrance.at(now_s)

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
        self._entrance.load_done(uid, error)

    def forget_adapter(self, uid: AdapterUid) -> None:
        """An adapter was withdrawn and no request refers to it: it leaves the pool, and so do its prefixes."""
        self._residency.remove(uid)
        self._admission.forget_adapter(uid)
        if self._prefixes is not None:
            self._prefixes.drop(uid)

    # ------------------------------------------------------------------ plan

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """The next step, or None when there is nothing to compute or copy now.

        Args:
            now_s: by whatever clock; the time limit of loads asks for it, and how long somebody has waited.
        """
        self.at(now_s)
        step = self._num_steps
        draft = Draft(step, self._max_batch_tokens, now_s, self._page_tokens)
        self.swap.begin_plan()
        self._grow_decoding(draft)
        decode, decode_rows = self._seats.decode_rows
        draft.budget -= len(decode)
        for seq in self._seats.prefilling:
            draft.add_chunk(seq)
        self._entrance.admit(draft, step - len(self._in_flight))
        if self._long_waits is not None:
            self._tell_long_waits(self._long_waits.due(now_s), now_s)
        if not (decode or draft.chunks or draft.load):
            return None

        rows = decode_rows
        if draft.sampling:
            rows = (*decode_rows, *draft.sampling)
            for seq in draft.sampling:
                self._start_decoding(seq)
        for seq in self._last_rows.take(step):
            self._seats.start_draining(seq)
        swap_out, swap_in = self.swap.take_copies()
        plan = StepPlan(
            step=step,
            vacate=self._seats.take_vacated(),
            swap_out=swap_out,
            evict=self._entrance.take_evicted(),
            load=tuple(draft.load),
            swap_in=swap_in,
            start=tuple(draft.start),
            grow=tuple(draft.grow),
            chunks=tuple(draft.chunks),
            decode=decode,
        )
        self._num_steps += 1
        self._in_flight.append((plan, rows))
        return plan

    def _tell_long_waits(self, sequences: list[Sequence], now_s: float) -> None:
        for seq in sequences:
            waited_s, reason = now_s - seq.request.arrival_s, self._entrance.reason(seq)
            self._events.append(RequestWaiting(seq.request_id, waited_s, reason.value, self._entrance.waited(seq)))

    def _grow_decoding(self, draft: Draft) -> None:
        """Give a page to every decoding sequence whose pages are full, the oldest first."""
        for seq in sorted(self._growth.take(draft.step), key=lambda seq: seq.order):
            if seq.state is not SequenceState.DECODE:
                continue  # lost its seat to an older one just now
            while (pages := self._pages.grow(seq, self._entrance.overtakable_by_all)) is None:
                victim = self._preemption.victim(self._seats)  # never one that has grown: those are ahead of `seq`
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                draft.grow.append(SeatGrow(seq.seat, pages))
                seq.grow_step += self._page_tokens
                self._enter_growth(seq)
        self._entrance.note_evicted()

    def _start_decoding(self, seq: Sequence) -> None:
        """The known tokens of a sequence are planned: enter what comes in the calendar."""
        self._seats.start_decoding(seq)
        seq.first_decode_step = self._num_steps + 1
        seq.last_step = self._num_steps + seq.max_tokens - 1 - seq.num_known
        seq.grow_step = seq.first_decode_step + len(seq.pages) * self._page_tokens - seq.num_known
        self._last_rows.enter(seq.last_step, seq)
        self._enter_growth(seq)

    def _enter_growth(self, seq: Sequence) -> None:
        if seq.grow_step <= seq.last_step:
            self._growth.enter(seq.grow_step, seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's seat away. It goes on later with what is left of its pages, and its tokens.

        One that drains will not: it ends with the token in flight, and loses nothing by giving its pages up before.
        """
        if seq.state is SequenceState.DRAINING:
            self._unseat(seq, SequenceState.WAITING)
        else:
            self._retire(seq, SequenceState.WAITING, self._pages.set_aside)
            self.num_preemptions += 1
        seq.resume_step = self._num_steps
        self._entrance.push(seq)

    # ------------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step sampled. Plans are committed in the order they were made."""
        planned, rows = self._in_flight.popleft()
        assert planned is plan, f"step {plan.step} committed before step {planned.step}"
        logprobs = result.logprobs or (None,) * len(rows)
        assert len(rows) == len(result.token_ids) == len(logprobs)
        self.num_output_tokens += len(rows)
        num_decoded = len(plan.decode) if result.logprobs is None else 0
        self._take_in_decoded(rows[:num_decoded], result.token_ids)
        for seq, token, token_logprobs in islice(zip(rows, result.token_ids, logprobs, strict=True), num_decoded, None):
            self._take_in(seq, token, token_logprobs)

    def _take_in_decoded(self, rows: tuple[Sequence, ...], token_ids: tuple[int, ...]) -> None:
        """Append a token to each of some sequences: what `_take_in` does, and all that most rows of most steps take.

        Args:
            token_ids: as many as rows, or more.
        """
        decoding = SequenceState.DECODE
        add_event = self._events.append
        for seq, token in zip(rows, token_ids, strict=False):
            # Neither its first token, which a chunk samples, nor the last one by length: for that it would drain.
            if seq.state is decoding and token not in seq.stop_ids:
                seq.token_ids.append(token)
                add_event(TokenEvent(seq.request_id, seq.index, token))
            else:
                self._take_in(seq, token, None)

    def _take_in(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to a sequence."""
        if seq.state is SequenceState.ENDED:
            self.num_output_tokens -= 1  # the one token in excess
            return
        seq.token_ids.append(token)
        start = seq.start if seq.num_outputs == 1 else None
        reason = seq.finish_reason()
        stop_token = token if reason is FinishReason.STOP else None
        self._events.append(TokenEvent(seq.request_id, seq.index, token, logprobs, reason, stop_token, start))
        if reason is not None:
            self._admission.ended(seq)
            self._end(seq)

    # ------------------------------------------------------------------ ends

    def _unseat(self, seq: Sequence, state: SequenceState) -> None:
        self._retire(seq, state, self._pages.leave)

    def _retire(self, seq: Sequence, state: SequenceState, leave_pages: Callable[[Sequence, int], None]) -> None:
        if seq.state is SequenceState.DECODE:
            self._growth.strike(seq.grow_step, seq)
            self._last_rows.strike(seq.last_step, seq)
        leave_pages(seq, self._num_steps)  # which asks for the state that it leaves
        self._seats.leave(seq, state)

    def _drop(self, seq: Sequence) -> None:
        """A sequence is over, wherever it stands."""
        if seq.is_seated:
            self._unseat(seq, SequenceState.ENDED)
        elif seq.state is SequenceState.WAITING:
            self._entrance.remove(seq)
            self._pages.forget(seq)
            seq.state = SequenceState.ENDED

    def _end(self, seq: Sequence) -> None:
        self._drop(seq)
        entry = self._open[seq.request_id]
        entry.num_open -= 1
        if entry.num_open == 0:
            self._close(entry, RequestFinished(seq.request_id))

    def _close(self, entry: OpenRequest, terminal: RequestFinished | RequestAborted | RequestFailed) -> None:
        del self._open[entry.request.id]
        for seq in entry.sequences:
            self._drop(seq)
        self._events.append(entry.with_waits(terminal))

    def _fail_waiting(self, uid: AdapterUid, reason: str) -> None:
        """Fail the requests that wait for an adapter which cannot be had."""
        for seq in self._entrance.waiting_for(uid):
            if seq.request_id in self._open:
                self._close(self._open[seq.request_id], RequestFailed(seq.request_id, reason))

    # ------------------------------------------------------------------ what others may see

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def has_events(self) -> bool:
        """Whether something has happened that nobody has been told of."""
        return bool(self._events)

    @property
    def would_start_at_once(self) -> bool:
        """Whether a request that came now would start in the next step, if its adapter is in the pool."""
        return self._entrance.would_start_at_once

    @property
    def num_running(self) -> int:
        return len(self._seats)

    @property
    def num_waiting(self) -> int:
        return len(self._entrance)

    @property
    def resumed(self) -> ResumeCounts:
        """How preempted sequences went on."""
        return self._pages.resumed

    def waiting_by_reason(self) -> Counter[WaitReason]:
        """How many sequences wait, and for what, as of the last plan."""
        return self._entrance.waiting_by_reason()
