"""Which adapters are in the pool, on their way, or may leave. No torch: pages and counts only.

    COLD ──start_load──▶ LOADING ──finish_load──▶ RESIDENT ──evict──▶ COLD
                            └──────fail_load──────▶ COLD

An adapter is *pinned* while a running sequence uses it, and while it is loading (its copy writes to its pages).
Unpinned it stays warm until pages are wanted: those that nobody waits for leave first, in the order of the eviction
policy, then those whose first sequence is the last in line. Pages are handed on at once when an adapter leaves: whoever
executes plans orders the next owner's writes after the last reads (`adapters/copy.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from interleaf.core import AdapterFound, AdapterUid
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import Evictable, EvictionPolicy, Reclaimer
from interleaf.stats import LOAD_BOUNDS_S


class AdapterState(Enum):
    """Where an adapter stands with the pool."""

    COLD = "cold"
    LOADING = "loading"
    RESIDENT = "resident"


class _Adapter(Evictable):
    """An adapter that a request has named. It is remembered while it is cold, for the sake of its use count.

    Attributes:
        users: running sequences.
        waiters: waiting sequences.
        doomed: it leaves as soon as its copy has ended.
        ahead_of_need: it was loaded for a sequence that had no seat to take, and none has used it yet.
        load_s: seconds that its load took, until a sequence has used it.
    """

    __slots__ = ("ahead_of_need", "doomed", "load_s", "owner", "pages", "residency", "state", "uid", "users", "waiters")

    def __init__(self, residency: Residency, uid: AdapterUid) -> None:
        super().__init__(OwnerKind.ADAPTER, 0)
        self.residency = residency
        self.uid = uid
        self.owner = PageOwner(OwnerKind.ADAPTER, uid)
        self.pages: tuple[int, ...] = ()
        self.state = AdapterState.COLD
        self.users = 0
        self.waiters = 0
        self.doomed = False
        self.ahead_of_need = False
        self.load_s: float | None = None

    def evict(self) -> None:
        """Leave: the pages are wanted."""
        self.residency.evict(self.uid)


@dataclass(slots=True)
class ResidencyCounts:
    """Running totals.

    Attributes:
        hits, misses: requests whose adapter was, or was not, resident when they were first considered.
        late_prefetches: of neither kind: it was being copied, ahead of need.
        prefetches: loads begun ahead of need; they are among `loads`.
        prefetched_unused: of those, the adapters that left without having been used.
        load_times: finished loads by class of LOAD_BOUNDS_S, and those beyond.   load_s: seconds that they took.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failed_loads: int = 0
    late_prefetches: int = 0
    prefetches: int = 0
    prefetched_unused: int = 0
    load_times: list[int] = field(default_factory=lambda: [0] * (len(LOAD_BOUNDS_S) + 1))
    load_s: float = 0.0


class Residency:
    """The adapters in the pool. All methods are called by the scheduler's thread.

    Attributes:
        reclaimer: the idle things of the pool, adapters and whatever else shares it.
        num_busy_pages: pages of pinned adapters.
    """

    def __init__(self, allocator: PageAllocator, policy: EvictionPolicy) -> None:
        self._allocator = allocator
        self.reclaimer = Reclaimer(allocator, policy)
        self._known: dict[AdapterUid, _Adapter] = {}
        self._pooled: dict[AdapterUid, _Adapter] = {}
        self._evicted: list[AdapterUid] = []
        self._num_awaited_pages = 0  # of adapters that would be idle if nobody waited for them
        self.num_busy_pages = 0
        self.counts = ResidencyCounts()

    @property
    def num_pages(self) -> int:
        """Pages that adapters may have, in use or not."""
        return self._allocator.num_pages

    def state(self, uid: AdapterUid) -> AdapterState:
        entry = self._pooled.get(uid)
        return AdapterState.COLD if entry is None else entry.state

    def pages(self, uid: AdapterUid) -> tuple[int, ...]:
        """The pages of an adapter in image order; empty when it is cold."""
        entry = self._pooled.get(uid)
        return () if entry is None else entry.pages

    def resident(self) -> tuple[AdapterUid, ...]:
        return tuple(uid for uid, entry in self._pooled.items() if entry.state is AdapterState.RESIDENT)

    def pages_by_adapter(self) -> dict[AdapterUid, int]:
        """Pages of every adapter in the pool, those under a copy among them. Costs a walk over them."""
        return {uid: entry.num_pages for uid, entry in self._pooled.items()}

    # ------------------------------------------------------------------ who wants it

    def count_use(self, uid: AdapterUid) -> None:
        """A request of it has arrived."""
        self.reclaimer.policy.tick()
        self.reclaimer.touch(self._entry(uid))

    def add_waiter(self, uid: AdapterUid) -> None:
        """A sequence of it waits."""
        entry = self._entry(uid)
        self._be_busy(entry)
        entry.waiters += 1
        self._be_idle(entry)

    def remove_waiter(self, uid: AdapterUid) -> None:
        """A sequence of it waits no longer."""
        entry = self._known[uid]
        assert entry.waiters > 0
        self._be_busy(entry)
        entry.waiters -= 1
        self._be_idle(entry)

    def count_lookup(self, uid: AdapterUid) -> AdapterFound:
        """A sequence of it is considered for the first time. Returns: as what that was counted."""
        entry = self._entry(uid)
        if entry.state is AdapterState.RESIDENT:
            self.counts.hits += 1
            return AdapterFound.HIT
        if entry.ahead_of_need:
            self.counts.late_prefetches += 1
            return AdapterFound.LATE
        self.counts.misses += 1
        return AdapterFound.MISS

    def pin(self, uid: AdapterUid) -> None:
        """A sequence that uses the adapter takes a seat."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.RESIDENT
        if entry.users == 0:
            self._be_busy(entry)
            self.num_busy_pages += len(entry.pages)
        entry.users += 1
        entry.ahead_of_need = False

    def unpin(self, uid: AdapterUid) -> None:
        """A sequence that used the adapter has left its seat."""
        entry = self._pooled[uid]
        assert entry.users > 0
        entry.users -= 1
        if entry.users == 0:
            self.num_busy_pages -= len(entry.pages)
            self.reclaimer.policy.released(entry)
            self._be_idle(entry)

    # ------------------------------------------------------------------ loads

    def start_load(self, uid: AdapterUid, num_pages: int, *, ahead_of_need: bool = False) -> tuple[int, ...]:
        """Pages for a cold adapter, which is LOADING from now on.

        Raises: OutOfPages: make room first.
        """
        entry = self._entry(uid)
        assert entry.state is AdapterState.COLD, f"adapter {uid} is {entry.state.value}"
        entry.pages = self._allocator.alloc(num_pages, entry.owner)
        entry.num_pages = num_pages
        entry.state = AdapterState.LOADING
        entry.ahead_of_need = ahead_of_need
        self._pooled[uid] = entry
        self.num_busy_pages += num_pages
        self.counts.loads += 1
        self.counts.prefetches += ahead_of_need
        return entry.pages

    def finish_load(self, uid: AdapterUid) -> None:
        """The copy is ordered before every later step: the adapter is RESIDENT."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.LOADING
        self.num_busy_pages -= len(entry.pages)
        entry.state = AdapterState.RESIDENT
        self.reclaimer.policy.released(entry)
        self._be_idle(entry)
        if entry.doomed:
            self._drop(entry)
            self._forget(entry)

    def note_load(self, uid: AdapterUid, seconds: float) -> None:
        """A load that has finished took so long."""
        self.counts.load_times[bisect_left(LOAD_BOUNDS_S, seconds)] += 1
        self.counts.load_s += seconds
        entry = self._pooled.get(uid)
        if entry is not None and entry.state is AdapterState.RESIDENT:
            entry.load_s = seconds

    def take_load_s(self, uid: AdapterUid) -> float | None:
        """Seconds that an adapter's load took, for the first sequence that uses it; None for all others."""
        entry = self._pooled[uid]
        seconds, entry.load_s = entry.load_s, None
        return seconds

    def fail_load(self, uid: AdapterUid) -> None:
        """The copy failed: the adapter is COLD again and its pages are free."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.LOADING
        self.num_busy_pages -= len(entry.pages)
        self.counts.failed_loads += 1
        is_forgotten = entry.doomed
        self._drop(entry)
        if is_forgotten:
            self._forget(entry)

    def abandon_load(self, uid: AdapterUid) -> None:
        """Nobody waits for a copy any longer. It still writes to its pages: they are free once its end is reported."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.LOADING
        entry.doomed = True

    # ------------------------------------------------------------------ who leaves

    def make_room(self, num_pages: int, last_in_line: Iterable[AdapterUid] = ()) -> bool:
        """Evict idle things until `num_pages` are free.

        Args:
            last_in_line: adapters that only sequences wait for which may be overtaken, the furthest behind first: when
                nothing else is idle they leave too.

        Returns: whether that many are free now. When it cannot be had, nothing is evicted.
        """
        if self.reclaimer.make_room(num_pages):
            return True
        short = num_pages - self._allocator.num_free_pages - self.reclaimer.num_idle_pages
        return self._evict_awaited(short, last_in_line) and self.reclaimer.make_room(num_pages)

    def make_room_ahead(
        self, uid: AdapterUid, num_pages: int, reserve_pages: int, within: int, far_behind: Iterable[AdapterUid]
    ) -> bool:
        """Make room to load an adapter ahead of need, and evict for it only what is worth less.

        Args:
            reserve_pages: so many must still be free after it, or such as could be evicted for it.
            within: among so many requests, the next ones, is the one that needs it.
            far_behind: adapters that are waited for, but not by any of the next requests; the furthest behind first.
        """
        free = self._allocator.num_free_pages
        last = list(far_behind)
        missing = num_pages + reserve_pages - free - self.reclaimer.num_idle_pages
        if missing > 0 and self._awaited_victims(missing, last) is None:
            return False
        if self.reclaimer.make_room_for(self._entry(uid), within, num_pages):
            return True
        return self._evict_awaited(num_pages - free, last)

    def _evict_awaited(self, short: int, uids: Iterable[AdapterUid]) -> bool:
        """Evict those of some adapters that are idle but waited for, until so many pages are free; all or nothing."""
        victims = self._awaited_victims(short, uids)
        for victim in victims or ():
            self.evict(victim.uid)
        return victims is not None

    def _awaited_victims(self, short: int, uids: Iterable[AdapterUid]) -> list[_Adapter] | None:
        """The first of some adapters that are idle but waited for, with so many pages; None if there are fewer."""
        if short > self._num_awaited_pages:
            return None
        victims = []
        for uid in uids:
            entry = self._pooled.get(uid)
            if entry is not None and entry.state is AdapterState.RESIDENT and entry.users == 0:
                victims.append(entry)
                short -= entry.num_pages
                if short <= 0:
                    return victims
        return None

    def remove(self, uid: AdapterUid) -> None:
        """The adapter was withdrawn and no request refers to it: its pages are freed, those under a copy after it."""
        entry = self._known.get(uid)
        if entry is None:
            return
        if entry.state is AdapterState.LOADING:
            entry.doomed = True
            return
        if entry.state is AdapterState.RESIDENT:
            self._drop(entry)
        self._forget(entry)

    def evict(self, uid: AdapterUid) -> None:
        """An idle adapter leaves."""
        self.counts.evictions += 1
        self._drop(self._pooled[uid])

    def take_evicted(self) -> tuple[AdapterUid, ...]:
        """The adapters that have left since the last call, for the next plan."""
        if not self._evicted:
            return ()
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def check(self) -> None:
        """Assert that the accounts agree with the adapters. Costs a walk over those in the pool."""
        busy = awaited = 0
        for entry in self._pooled.values():
            is_idle = entry.state is AdapterState.RESIDENT and entry.users == 0
            busy += 0 if is_idle else len(entry.pages)
            awaited += len(entry.pages) if is_idle and entry.waiters else 0
            assert (entry.ticket is not None) == (is_idle and not entry.waiters), f"adapter {entry.uid}"
        assert (busy, awaited) == (self.num_busy_pages, self._num_awaited_pages)

    def _entry(self, uid: AdapterUid) -> _Adapter:
        entry = self._known.get(uid)
        if entry is None:
            entry = self._known[uid] = _Adapter(self, uid)
        return entry

    def _forget(self, entry: _Adapter) -> None:
        if not entry.waiters:
            del self._known[entry.uid]

    def _be_idle(self, entry: _Adapter) -> None:
        """Let it leave if it may, and by the way that fits."""
        if entry.state is AdapterState.RESIDENT and entry.users == 0:
            if entry.waiters:
                self._num_awaited_pages += entry.num_pages
            else:
                self.reclaimer.add(entry)

    def _be_busy(self, entry: _Adapter) -> None:
        """Undo `_be_idle`."""
        if entry.state is AdapterState.RESIDENT and entry.users == 0:
            if entry.waiters:
                self._num_awaited_pages -= entry.num_pages
            else:
                self.reclaimer.discard(entry)

    def _drop(self, entry: _Adapter) -> None:
        assert entry.users == 0
        self._be_busy(entry)
        self.counts.prefetched_unused += entry.ahead_of_need
        entry.ahead_of_need = entry.doomed = False
        entry.load_s = None
        entry.state = AdapterState.COLD
        self._allocator.free(entry.pages, entry.owner)
        entry.pages = ()
        del self._pooled[entry.uid]
        self._evicted.append(entry.uid)
