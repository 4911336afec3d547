"""Adapters on their way to the pool: how many at a time, for whom, and for how long. Knows no seat and no plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from interleaf.adapters.residency import Residency
from interleaf.core import AdapterLoad, AdapterUid, HostState, PooledLayout
from interleaf.scheduler.queue import WaitingQueue
from interleaf.scheduler.sequence import Sequence
from interleaf.scheduler.standing import Standing


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


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How adapters are sent for.

    Attributes:
        max_loads: on their way at a time, to host memory or to the pool.
        prefetch_loads: of those, how many may be for sequences that have no seat to take yet; 0: none.
        timeout_s: a load or a fetch that takes longer fails the requests that wait for it; None: they wait on.
    """

    max_loads: int = 32
    prefetch_loads: int = 0
    timeout_s: float | None = None


class Sent(Enum):
    """What came of sending for an adapter."""

    ON_ITS_WAY = "on its way"
    NO_PAGES = "no pages"
    TOO_FAR_BEHIND = "too far behind"
    FAILED = "failed"


class Loads:
    """Sends for adapters and watches over them until they are in the pool.

    Args:
        limits: see LoadLimits.
        horizon: how many of the next sequences are looked ahead to.
        most_pages: that an adapter may have.
        fail: called with an adapter that cannot be had, and why: those that wait for it are to be failed.
        can_spare: whether the running sequences can do without so many pages.
    """

    def __init__(
        self,
        residency: Residency,
        images: HostImages,
        waiting: WaitingQueue,
        limits: LoadLimits,
        horizon: int,
        most_pages: int,
        fail: Callable[[AdapterUid, str], None],
        can_spare: Callable[[int], bool],
    ) -> None:
        self._residency = residency
        self._images = images
        self._waiting = waiting
        self._limits = limits
        self._horizon = horizon
        self._most_pages = most_pages
        self._fail = fail
        self._can_spare = can_spare
        # When each began, in that order.
        self._loading: dict[AdapterUid, float] = {}
        self._fetching: dict[AdapterUid, float] = {}
        self._abandoned: dict[AdapterUid, str] = {}
        # For what is counted only: when each was first sent for, to the host tier or to the pool.
        self._sent_for_s: dict[AdapterUid, float] = {}
        self._arrived: list[AdapterUid] = []

    @property
    def num_under_way(self) -> int:
        return len(self._loading) + len(self._fetching)

    @property
    def is_full(self) -> bool:
        """Whether as many adapters as allowed are on their way."""
        return self.num_under_way >= self._limits.max_loads

    def has_room(self, num_free_seats: int) -> bool:
        """Whether another adapter may be sent for, of need or ahead of it."""
        return self.num_under_way < min(self._limits.max_loads, num_free_seats + self._limits.prefetch_loads)

    def exceeds_need(self, uid: AdapterUid, num_free_seats: int) -> bool:
        """Whether as many other adapters are on their way as there are seats to take."""
        return self.num_under_way - (uid in self._fetching) >= min(self._limits.max_loads, num_free_seats)

    @property
    def num_copies(self) -> int:
        """Adapters that are being copied to the pool."""
        return len(self._loading)

    def standing(self, uid: AdapterUid) -> Standing:
        """Where an adapter stands that nobody has waited for until now."""
        state = self._residency.state(uid)
        if uid in self._fetching:
            return Standing.FETCHING
        return {"resident": Standing.READY, "loading": Standing.LOADING, "cold": Standing.COLD}[state.value]

    def begin_plan(self, now_s: float) -> None:
        """Give up what has taken too long; the rest of what is being fetched is to be asked about again."""
        for uid in self._arrived:  # since the last plan
            self._residency.note_load(uid, max(0.0, now_s - self._sent_for_s.pop(uid)))
        self._arrived.clear()
        if self._limits.timeout_s is not None:
            self._give_up(now_s - self._limits.timeout_s)
        for uid, reason in self._abandoned.items():  # new requests of it would wait for the same copy
            self._fail(uid, reason)
        for uid in list(self._fetching):
            if self._waiting.standing(uid) is None:
                self._call_off(uid)  # nobody waits any more: the host tier keeps or drops it as it likes
            else:
                self._waiting.move(uid, Standing.FETCHING)

    def send_for(
        self, seq: Sequence, uid: AdapterUid, now_s: float, reserve_pages: int | None
    ) -> tuple[Sent, AdapterLoad | None]:
        """Have a cold adapter brought to the pool, on behalf of the first sequence that waits for it.

        Args:
            reserve_pages: None: the sequence has a seat to take. Else it has not, and the load may only evict what is
                worth less, and must leave so many pages free or idle.

        Returns: what came of it, and a copy to be planned.
        """
        if reserve_pages is not None and not self._may_look_ahead_to(seq):
            # What is being fetched for it makes way for those further ahead; the host tier may finish it all the same.
            self._call_off(uid)
            self._waiting.move(uid, Standing.COLD)
            return Sent.TOO_FAR_BEHIND, None
        state = self._images.prepare(uid)
        if state is HostState.FETCHING:
            self._fetching.setdefault(uid, now_s)
            self._sent_for_s.setdefault(uid, now_s)
            self._waiting.move(uid, Standing.ASKED)
            return Sent.ON_ITS_WAY, None
        self._fetching.pop(uid, None)
        if state is HostState.FAILED:
            self._sent_for_s.pop(uid, None)
            self._waiting.move(uid, Standing.COLD)
            self._fail(uid, self._images.failure(uid))
            return Sent.FAILED, None
        num_pages = self._images.layout(uid).pages
        if num_pages > self._most_pages:
            self._sent_for_s.pop(uid, None)
            self._waiting.move(uid, Standing.COLD)
            self._fail(uid, f"adapter {uid[:12]} takes {num_pages} pages, and {self._most_pages} at most can be had")
            return Sent.FAILED, None
        if not self._make_room(seq, uid, num_pages, reserve_pages):
            self._sent_for_s.pop(uid, None)
            self._waiting.move(uid, Standing.COLD)
            return Sent.NO_PAGES, None
        self._images.pin(uid)
        pages = self._residency.start_load(uid, num_pages, ahead_of_need=reserve_pages is not None)
        self._loading[uid] = now_s
        self._sent_for_s.setdefault(uid, now_s)
        self._waiting.move(uid, Standing.LOADING)
        return Sent.ON_ITS_WAY, AdapterLoad(uid, pages)

    def ended(self, uid: AdapterUid, error: str | None) -> None:
        """A copy was reported as ordered before all later steps, or as failed."""
        self._images.unpin(uid)
        self._loading.pop(uid, None)
        self._abandoned.pop(uid, None)
        if error is None:
            self._residency.finish_load(uid)
            self._arrived.append(uid)
        else:
            self._residency.fail_load(uid)
            self._sent_for_s.pop(uid, None)
        self._waiting.move(uid, self.standing(uid))
        if error is not None:
            self._fail(uid, error)

    def _call_off(self, uid: AdapterUid) -> None:
        """What is being fetched is not waited for."""
        self._fetching.pop(uid, None)
        self._sent_for_s.pop(uid, None)

    def _may_look_ahead_to(self, seq: Sequence) -> bool:
        return self._limits.prefetch_loads > 0 and self._waiting.place(seq) < self._horizon

    def _make_room(self, seq: Sequence, uid: AdapterUid, num_pages: int, reserve_pages: int | None) -> bool:
        if not self._can_spare(num_pages):
            return False
        if reserve_pages is not None:
            return self._residency.make_room_ahead(
                uid, num_pages, reserve_pages, self._waiting.place(seq) + 1, self._waiting.far_behind(self._horizon)
            )
        return self._residency.make_room(num_pages, self._waiting.overtakable(seq))

    def _give_up(self, begun_before_s: float) -> None:
        for under_way, what in ((self._loading, "copied to the pool"), (self._fetching, "read into host memory")):
            for uid, since_s in list(under_way.items()):
                if since_s >= begun_before_s:
                    break
                del under_way[uid]
                reason = f"adapter {uid[:12]} was not {what} within {self._limits.timeout_s:g} s"
                if under_way is self._loading:
                    self._residency.abandon_load(uid)
                    self._abandoned[uid] = reason
                else:
                    self._sent_for_s.pop(uid, None)
                self._fail(uid, reason)
