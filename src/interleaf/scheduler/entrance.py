"""Who starts next, and whose adapter is sent for. Owns the waiting sequences; knows nothing of those that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from interleaf.adapters.residency import Residency
from interleaf.core import AdapterUid
from interleaf.scheduler.draft import Draft
from interleaf.scheduler.loads import HostImages, LoadLimits, Loads, Sent
from interleaf.scheduler.pages import SequencePages
from interleaf.scheduler.policy import Policy
from interleaf.scheduler.queue import WaitingQueue
from interleaf.scheduler.seats import Seats
from interleaf.scheduler.sequence import Sequence, WaitReason
from interleaf.scheduler.standing import Standing


class Entrance:
    """Admission from the queue.

    An adapter that a sequence further ahead waits for is not evicted for one behind; one that only sequences behind
    wait for is. A sequence that waits for pages, its own or its adapter's, is not overtaken. So the first in line can
    always be served in the end.

    Args:
        refill_seats: see Scheduler.
        fail: called with an adapter that cannot be had, and why: those that wait for it are to be failed.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        seats: Seats,
        pages: SequencePages,
        residency: Residency,
        images: HostImages,
        limits: LoadLimits,
        refill_seats: int,
        fail: Callable[[AdapterUid, str], None],
    ) -> None:
        self._seats = seats
        self._pages = pages
        self._residency = residency
        self._refill_seats = refill_seats
        self._waiting = WaitingQueue(policy)
        self._times = self._waiting.times
        self._loads = Loads(
            residency, images, self._waiting, limits,
            horizon=seats.num_seats, most_pages=residency.num_pages - pages.shares_pool, fail=fail,
            can_spare=self._can_spare,
        )  # fmt: skip
        self._evicted: list[AdapterUid] = []
        self._step = 0
        self._group_is_cut = False
        self._reopens_at = 0  # free seats from which on it is tried again, since pages ran out

    def __len__(self) -> int:
        """Waiting sequences."""
        return len(self._waiting)

    def at(self, now_s: float) -> None:
        """So late it is now: whoever ceases to wait has waited till then."""
        self._times.at(now_s)

    def push(self, seq: Sequence) -> None:
        """A sequence waits from now on."""
        self._waiting.push(seq, Standing.READY if seq.adapter is None else self._loads.standing(seq.adapter))
        if seq.adapter is not None:
            self._residency.add_waiter(seq.adapter)

    def remove(self, seq: Sequence) -> None:
        """A sequence waits no longer."""
        for reason, seconds in self._waiting.remove(seq).items():
            seq.waits[reason] = seq.waits.get(reason, 0.0) + seconds
        if seq.adapter is not None:
            self._residency.remove_waiter(seq.adapter)

    def waiting_for(self, uid: AdapterUid) -> list[Sequence]:
        """Those that wait for an adapter, in order."""
        return self._waiting.waiting_for(uid)

    def load_done(self, uid: AdapterUid, error: str | None) -> None:
        """A copy was reported as ordered before all later steps, or as failed."""
        for seq in self._waiting.waiting_for(uid):
            if self._waiting.place(seq) >= self._seats.num_free:
                break
            self._count_lookup(seq)  # it could have had a seat, and has waited for this load
        self._loads.ended(uid, error)

    def admit(self, draft: Draft, num_committed: int) -> None:
        """Seat waiting sequences in order, and send for the adapters of those in reach of a seat.

        Args:
            num_committed: steps whose tokens are known.
        """
        self._step = draft.step
        self._times.begin_plan()
        self._loads.begin_plan(draft.now_s)
        held = closed = self._held_by()
        self._group_is_cut = False
        if len(self._waiting):
            closed = self._walk(draft, num_committed, closed)
            self._waiting.end_pass()
        if held is None:
            self._reopens_at = self._seats.num_free + self._group if closed is WaitReason.PAGES else 0
        unsent = WaitReason.LOAD_LIMIT if self._loads.is_full else WaitReason.SEATS
        self._times.end_plan(
            ready=closed or WaitReason.QUEUED,  # those passed over have reasons of their own
            cold=WaitReason.PAGES if closed is WaitReason.PAGES else unsent,
        )

    def _walk(self, draft: Draft, num_committed: int, closed: WaitReason | None) -> WaitReason | None:
        """Look at the first in line, again and again.

        Args:
            closed: why nobody may start; then only adapters are sent for.

        Returns: why nobody else could start.
        """
        num_free = num_left = self._seats.num_free
        may_send = True
        while True:
            if closed is None and num_left == 0:
                closed = WaitReason.SEATS
            standings = [Standing.FETCHING]  # on its way already: whether it has come is asked in any case
            if may_send and self._loads.has_room(num_free):
                standings.append(Standing.COLD)
            if closed is None:
                standings.append(Standing.READY)
            seq = self._waiting.first(*standings)
            if seq is None:
                return closed
            standing = self._waiting.standing(seq.adapter)
            if seq.adapter is not None and standing is not Standing.READY:
                # In reach of a seat are as many as seats are left, whoever waits for whatever among them.
                is_ahead = self._waiting.place(seq) >= num_left or self._loads.exceeds_need(seq.adapter, num_free)
                sent = self._send_for(draft, seq, seq.adapter, is_ahead)
                if sent is Sent.NO_PAGES and not is_ahead:
                    return WaitReason.PAGES
                if sent is Sent.NO_PAGES or (sent is Sent.TOO_FAR_BEHIND and standing is Standing.COLD):
                    may_send = False
                continue
            if draft.budget == 0 and seq.resume_step <= num_committed:
                closed, self._group_is_cut = WaitReason.TOKEN_BUDGET, True
                continue
            wait = WaitReason.LAST_TOKEN if seq.resume_step > num_committed else self._try_to_start(draft, seq)
            if wait is WaitReason.PAGES:
                return wait
            if wait is not None:
                self._waiting.pass_over(seq)
                self._times.pass_over(seq, wait)
            num_left -= 1

    def _held_by(self) -> WaitReason | None:
        """What there is too little of to start a group. A group that the token budget has cut is started whole.

        A draining sequence gives its seat back with the next commit, so it counts neither as decoding nor as a reason
        to start without it. Where pages ran out, seats tell when to try again: pages come back with them.
        """
        free = self._seats.num_free
        if not self._seats.decode_rows[0] or self._group_is_cut:
            return None
        if 0 < free < self._refill_seats:
            return WaitReason.SEATS
        return WaitReason.PAGES if free < self._reopens_at else None

    @property
    def would_start_at_once(self) -> bool:
        """Whether nobody waits, and who came now would start in the next step, as far as seats and tokens decide that.

        A prompt that one step was too small for is taken to fill the next one, too.
        """
        return not len(self) and not self._seats.prefilling and self._seats.num_free > 0 and self._held_by() is None

    @property
    def _group(self) -> int:
        """Sequences that must end before others start, when pages have run out: the same share of those that run as
        `refill_seats` is of all seats; 0 if prompts are not computed in groups.
        """
        if self._refill_seats == 1:
            return 0
        return max(1, self._refill_seats * len(self._seats) // self._seats.num_seats)

    def _send_for(self, draft: Draft, seq: Sequence, uid: AdapterUid, is_ahead: bool) -> Sent:
        """See to it that an adapter comes to the pool.

        Args:
            is_ahead: nobody who waits for it has a seat to take yet. Then as many pages are left free or idle as there
                are sequences that may need one any moment, if it could be one of the same.
        """
        if not is_ahead:
            self._count_lookup(seq)
        reserve = len(self._seats) if self._pages.shares_pool else 0
        sent, load = self._loads.send_for(seq, uid, draft.now_s, reserve if is_ahead else None)
        self.note_evicted()
        if load is not None:
            draft.load.append(load)
        return sent

    def _try_to_start(self, draft: Draft, seq: Sequence) -> WaitReason | None:
        """Seat a sequence whose adapter is in the pool. Returns: why it has to wait; None if it has started."""
        self._count_lookup(seq)
        wait = self._pages.start(seq, draft.step, self._waiting.overtakable(seq), is_alone=self._nobody_runs)
        self.note_evicted()
        if wait is None:
            self.remove(seq)
            self._seats.sit(seq)
            draft.add_start(seq)
        return wait

    def _count_lookup(self, seq: Sequence) -> None:
        if not seq.considered and seq.adapter is not None:
            seq.considered = True
            seq.found = self._residency.count_lookup(seq.adapter)

    @property
    def _nobody_runs(self) -> bool:
        """And no adapter that is on its way takes pages which one who runs alone may need."""
        return not len(self._seats) and not self._loads.num_copies

    def _can_spare(self, num_pages: int) -> bool:
        return not len(self._seats) or self._pages.can_spare(num_pages, self._step)

    # ------------------------------------------------------------------ what leaves, and what others may see

    def overtakable_by_all(self) -> Iterator[AdapterUid]:
        """Adapters that may leave for the sake of those that run, though sequences wait for them."""
        return self._waiting.overtakable(None)

    def note_evicted(self) -> None:
        """Tell the queue which adapters have left the pool."""
        for uid in self._residency.take_evicted():
            self._evicted.append(uid)
            self._waiting.move(uid, self._loads.standing(uid))  # it may have been sent for again since

    def take_evicted(self) -> tuple[AdapterUid, ...]:
        """The adapters that have left since the last call, for a plan."""
        self.note_evicted()
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def reason(self, seq: Sequence) -> WaitReason:
        """What a waiting sequence waits for, as of the last plan."""
        return self._times.reason(seq)

    def waited(self, seq: Sequence) -> dict[str, float]:
        """Seconds that a waiting sequence has waited, by reason."""
        return self._times.waited(seq)

    def waiting_by_reason(self) -> Counter[WaitReason]:
        """How many sequences wait, and for what, as of the last plan."""
        return self._times.counts()
