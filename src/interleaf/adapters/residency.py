"""Which adapters are in the pool, on their way, or may leave. No torch: pages and counts only.

    COLD ──start_load──▶ LOADING ──finish_load──▶ RESIDENT ──evict──▶ COLD
                            └──────fail_load──────▶ COLD

An adapter is *pinned* while a running sequence uses it, and while it is loading (its copy writes to its pages).
Unpinned it stays warm until pages are wanted. Pages are handed on at once when an adapter leaves: whoever executes
plans orders the next owner's writes after the last reads (`adapters/copy.py`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

from interleaf.core import AdapterUid
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import EvictionPolicy


class AdapterState(Enum):
    """Where an adapter stands with the pool."""

    COLD = "cold"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True)
class _Pooled:
    pages: tuple[int, ...]
    state: AdapterState
    users: int = 0
    doomed: bool = False


@dataclass(slots=True)
class ResidencyCounts:
    """Running totals. A *hit*: the adapter was resident when a request of it was first considered."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions: int = 0
    failed_loads: int = 0


class Residency:
    """The adapters in the pool. All methods are called by the scheduler's thread."""

    def __init__(self, allocator: PageAllocator, policy: EvictionPolicy[AdapterUid]) -> None:
        self._allocator = allocator
        self._policy = policy
        self._pooled: dict[AdapterUid, _Pooled] = {}
        self._evicted: list[AdapterUid] = []
        self.counts = ResidencyCounts()

    def state(self, uid: AdapterUid) -> AdapterState:
        entry = self._pooled.get(uid)
        return AdapterState.COLD if entry is None else entry.state

    def pages(self, uid: AdapterUid) -> tuple[int, ...]:
        """The pages of an adapter in image order; empty when it is cold."""
        entry = self._pooled.get(uid)
        return () if entry is None else entry.pages

    def resident(self) -> tuple[AdapterUid, ...]:
        return tuple(uid for uid, entry in self._pooled.items() if entry.state is AdapterState.RESIDENT)

    def count_lookup(self, state: AdapterState) -> None:
        """A request of an adapter in that state was considered for the first time."""
        if state is AdapterState.RESIDENT:
            self.counts.hits += 1
        else:
            self.counts.misses += 1

    def start_load(self, uid: AdapterUid, num_pages: int) -> tuple[int, ...]:
        """Pages for a cold adapter, which is LOADING from now on.

        Raises: OutOfPages: make room first.
        """
        assert uid not in self._pooled, f"adapter {uid} is {self.state(uid).value}"
        pages = self._allocator.alloc(num_pages, PageOwner(OwnerKind.ADAPTER, uid))
        self._pooled[uid] = _Pooled(pages, AdapterState.LOADING)
        self.counts.loads += 1
        return pages

    def finish_load(self, uid: AdapterUid) -> None:
        """The copy is ordered before every later step: the adapter is RESIDENT."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.LOADING
        entry.state = AdapterState.RESIDENT
        self._policy.touch(uid)
        if entry.doomed:
            self._drop(uid)

    def fail_load(self, uid: AdapterUid) -> None:
        """The copy failed: the adapter is COLD again and its pages are free."""
        assert self._pooled[uid].state is AdapterState.LOADING
        self.counts.failed_loads += 1
        self._drop(uid)

    def pin(self, uid: AdapterUid) -> None:
        """A sequence that uses the adapter takes a seat."""
        entry = self._pooled[uid]
        assert entry.state is AdapterState.RESIDENT
        entry.users += 1
        self._policy.touch(uid)

    def unpin(self, uid: AdapterUid) -> None:
        """A sequence that used the adapter has left its seat."""
        entry = self._pooled[uid]
        assert entry.users > 0
        entry.users -= 1
        self._policy.touch(uid)

    def make_room(self, num_pages: int, keep: Container[AdapterUid] = ()) -> bool:
        """Evict idle adapters until `num_pages` are free; those in `keep` stay.

        Returns: whether that many are free now. When it cannot be had, nothing is evicted.
        """
        short = num_pages - self._allocator.num_free_pages
        if short <= 0:
            return True
        victims = []
        for uid in self._policy.candidates():
            entry = self._pooled[uid]
            if entry.users == 0 and uid not in keep:
                victims.append(uid)
                short -= len(entry.pages)
                if short <= 0:
                    for victim in victims:
                        self.counts.evictions += 1
                        self._drop(victim)
                    return True
        return False

    def remove(self, uid: AdapterUid) -> None:
        """The adapter was withdrawn and no request refers to it: its pages are freed, those under a copy after it."""
        entry = self._pooled.get(uid)
        if entry is None:
            return
        if entry.state is AdapterState.LOADING:
            entry.doomed = True
        else:
            self._drop(uid)

    def take_evicted(self) -> tuple[AdapterUid, ...]:
        """The adapters that have left since the last call, for the next plan."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def _drop(self, uid: AdapterUid) -> None:
        entry = self._pooled.pop(uid)
        assert entry.users == 0
        self._policy.forget(uid)
        self._allocator.free(entry.pages, PageOwner(OwnerKind.ADAPTER, uid))
        self._evicted.append(uid)
