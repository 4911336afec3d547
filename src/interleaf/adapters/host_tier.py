"""The host tier's book-keeping: images in memory within a budget. Knows no pool, and not how images are made.

Two kinds of tier fill it in: `store.AdapterStore` reads and lays out adapters itself, `slabs.SlabStore` maps what
another process has laid out.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, RLock

from interleaf.adapters.disk_tier import DiskCounts, DiskTier
from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterUid, HostState, PooledLayout
from interleaf.errors import AdapterLoadFailed

logger = logging.getLogger(__name__)

_ARRIVAL_HOLD_S = 2.0
"""Seconds that an image which was fetched is kept for whoever sent for it, should nobody ask again."""


@dataclass(slots=True)
class HostEntry:
    """One registered adapter.

    Attributes:
        sources: what its image can be made of, the first first. All held it when they were registered.
        removed: it goes with its last pin.
    """

    sources: list[str]
    layout: PooledLayout
    num_bytes: int
    image: AdapterImage | None = None
    pins: int = 0
    fetching: bool = False
    held_until_s: float = 0.0
    failure: str | None = None
    failure_reported: bool = False
    removed: bool = False


class HostTier(ABC):
    """Registered adapters of one rank. All methods may be called from any thread.

    An image leaves memory, least recently used first, when the budget is exceeded; but not while it is pinned, not
    between the answer READY and the pin that follows it, and not between its arrival and that answer. Fetches wait
    until what must stay leaves room, so the budget is exceeded only by one adapter that is larger than all of it.
    Beside it a disk tier holds, for a moment, the images that it is writing.

    Args:
        budget_bytes: of images in memory.
        disk: takes what leaves memory, and is asked before an image is made again; closed with this tier.
        prepare: what is done to an image before it is kept, such as registering its memory with a device's driver.
        executor: where images that were prepared are given up; None: wherever the last reference goes.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        disk: DiskTier | None = None,
        prepare: Callable[[AdapterImage], AdapterImage] | None = None,
        executor: Executor | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._disk = disk
        self._prepare = prepare
        self._executor = executor
        self._now = now
        self._lock = RLock()
        self._fetch_ended = Condition(self._lock)
        self._entries: dict[AdapterUid, HostEntry] = {}
        self._in_memory: OrderedDict[AdapterUid, HostEntry] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._coming_bytes = 0
        # The adapter that READY was last said of. One is enough: the scheduler pins before it asks for another.
        self._promised: AdapterUid | None = None
        # All that must stay are among these, which are few: so nobody has to look through everything in memory.
        self._kept: dict[AdapterUid, HostEntry] = {}
        self._closed = False

    @abstractmethod
    def add(self, source: str) -> AdapterUid:
        """Register what `source` holds. The same contents again, from wherever, are the same adapter."""

    @abstractmethod
    def _fetch(self, uid: AdapterUid, entry: HostEntry) -> None:
        """Have an image made again: `_arrived` will be called with it, or with why not. Does not wait."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the images in memory."""
        return self._used_bytes

    @property
    def num_in_memory(self) -> int:
        return len(self._in_memory)

    @property
    def disk_counts(self) -> DiskCounts:
        """What the disk tier holds and has done; all 0 without one."""
        return DiskCounts() if self._disk is None else self._disk.counts

    def __len__(self) -> int:
        """Registered adapters."""
        return len(self._entries)

    def __contains__(self, uid: object) -> bool:
        entry = self._entries.get(AdapterUid(uid)) if isinstance(uid, str) else None
        return entry is not None and not entry.removed

    def _register(self, uid: AdapterUid, source: str, image: AdapterImage) -> None:
        with self._lock:
            self._install(uid, self._enter(uid, source, image), image)

    def _enter(self, uid: AdapterUid, source: str, image: AdapterImage) -> HostEntry:
        """Have an entry for an adapter whose image has been seen."""
        assert not self._closed, "the store is closed"
        entry = self._entries.get(uid)
        if entry is None:
            entry = self._entries[uid] = HostEntry([], image.layout, image.num_bytes)
        if source not in entry.sources:
            entry.sources.append(source)
        entry.failure, entry.removed = None, False
        return entry

    def layout(self, uid: AdapterUid) -> PooledLayout:
        """Where everything of a registered adapter lies."""
        return self._entry(uid).layout

    def prepare(self, uid: AdapterUid) -> HostState:
        """Whether an adapter's image is in memory. If not, it is sent for, now or as soon as there is room for it.

        Returns: READY: `pin` it before the next call, else it may leave again. FETCHING: ask again later. FAILED: it
            could not be had, `failure` says why; said once, the next call makes a new attempt.
        """
        with self._lock:
            entry = self._entry(uid)
            self._promised = None
            if entry.image is None and not entry.fetching and (entry.failure is None or entry.failure_reported):
                entry.failure = None
                if not self._has_room(entry):
                    return HostState.FETCHING
                self._expect(entry)
                self._send_for(uid, entry)
            if entry.image is not None:
                entry.held_until_s = 0.0
                self._promised = uid
                self._kept[uid] = entry
                self._in_memory.move_to_end(uid)
                return HostState.READY
            if entry.failure is not None:
                entry.failure_reported = True
                return HostState.FAILED
            return HostState.FETCHING

    def failure(self, uid: AdapterUid) -> str:
        """Why the last fetch failed; empty if it did not."""
        return self._entry(uid).failure or ""

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Return when a fetch has ended, or after `timeout_s`: what waits may also wait for room."""
        with self._lock:
            self._fetch_ended.wait(timeout_s)

    def image(self, uid: AdapterUid) -> AdapterImage:
        """The image of an adapter that is pinned, or that `prepare` has just called READY.

        Raises: AdapterLoadFailed: it is not in memory.
        """
        image = self._entry(uid).image
        if image is None:
            raise AdapterLoadFailed(uid, "its image is not in host memory")
        return image

    def pin(self, uid: AdapterUid) -> None:
        """Keep an image in memory until `unpin`: it is being copied.

        Raises: AdapterLoadFailed: it is not in memory.
        """
        with self._lock:
            self.image(uid)
            entry = self._kept[uid] = self._entry(uid)
            entry.pins += 1

    def unpin(self, uid: AdapterUid) -> None:
        """Undo one `pin`."""
        with self._lock:
            entry = self._entry(uid)
            assert entry.pins > 0, f"adapter {uid} is not pinned"
            entry.pins -= 1
            if self._promised == uid:
                self._promised = None
            if entry.removed and entry.pins == 0:
                self._forget(uid)
            self._trim()

    def remove(self, uid: AdapterUid) -> None:
        """Forget an adapter; one that is pinned goes with its last pin. Unknown adapters are ignored."""
        with self._lock:
            entry = self._entries.get(uid)
            if entry is None:
                return
            entry.removed = True
            if entry.pins == 0:
                self._forget(uid)

    def close(self) -> None:
        """Forget everything; fetches under way come to nothing."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._in_memory.clear()
            self._kept.clear()
            self._used_bytes = 0
        if self._disk is not None:
            self._disk.close()

    def _entry(self, uid: AdapterUid) -> HostEntry:
        entry = self._entries.get(uid)
        if entry is None:
            raise AdapterLoadFailed(uid, "it is not registered")
        return entry

    def _must_stay(self, uid: AdapterUid, entry: HostEntry) -> bool:
        return entry.pins > 0 or uid == self._promised or entry.held_until_s > self._now()

    def _has_room(self, wanted: HostEntry) -> bool:
        """Whether an image may be sent for beside all that is on its way or must stay."""
        staying = self._coming_bytes
        for uid, entry in list(self._kept.items()):
            if entry.image is not None and self._must_stay(uid, entry):
                staying += entry.num_bytes
            else:
                del self._kept[uid]
        return staying == 0 or staying + wanted.num_bytes <= self._budget_bytes

    def _expect(self, entry: HostEntry) -> None:
        entry.fetching = True
        self._coming_bytes += entry.num_bytes

    def _send_for(self, uid: AdapterUid, entry: HostEntry) -> None:
        """Have an image brought from disk, or made again."""
        if self._disk is not None and self._disk.holds(uid):
            self._disk.fetch(uid, entry.layout, lambda image: self._from_disk(uid, entry, image))
        else:
            self._fetch(uid, entry)

    def _from_disk(self, uid: AdapterUid, entry: HostEntry, image: AdapterImage | None) -> None:
        """What the disk tier was asked for has come, or cannot be had."""
        if image is not None:
            self._arrived(uid, entry, self._prepared(image), None)
        elif self._entries.get(uid) is entry:
            self._fetch(uid, entry)
        else:
            self._arrived(uid, entry, None, "it was removed")

    def _prepared(self, image: AdapterImage) -> AdapterImage:
        """The image as it is to be kept. One that cannot be prepared is as good, if slower to copy."""
        if self._prepare is None:
            return image
        try:
            return self._prepare(image)
        except Exception:  # on a thread of our own, where nobody else would hear of it, and requests wait
            logger.exception("an image could not be prepared for copies")
            return image

    def _arrived(self, uid: AdapterUid, entry: HostEntry, image: AdapterImage | None, failure: str | None) -> None:
        with self._lock:
            entry.fetching = False
            self._coming_bytes -= entry.num_bytes
            self._fetch_ended.notify_all()
            if self._entries.get(uid) is not entry:
                return  # removed, or the store was closed
            if image is not None:
                entry.held_until_s = self._now() + _ARRIVAL_HOLD_S
                self._kept[uid] = entry
                self._install(uid, entry, image)
            elif entry.image is None:  # else it was registered again meanwhile
                entry.failure, entry.failure_reported = failure, False

    def _install(self, uid: AdapterUid, entry: HostEntry, image: AdapterImage) -> None:
        """Keep an image as the most recently used one, if the budget allows."""
        if entry.image is None:
            entry.image = image
            self._in_memory[uid] = entry
            self._used_bytes += entry.num_bytes
        self._in_memory.move_to_end(uid)
        self._trim()

    def _trim(self) -> None:
        """Drop images, least recently used first, until the budget is kept or all that are left must stay."""
        if self._used_bytes <= self._budget_bytes:
            return
        for uid, entry in list(self._in_memory.items()):
            if not self._must_stay(uid, entry):
                leaving = self._take_out(uid, entry)
                if self._disk is not None:
                    self._disk.offer(uid, leaving)
                else:
                    self._let_go(leaving)
                if self._used_bytes <= self._budget_bytes:
                    return

    def _take_out(self, uid: AdapterUid, entry: HostEntry) -> list[AdapterImage]:
        """Returns: the image, in a list that whoever gives it up clears: nobody else refers to it from here."""
        leaving = [] if entry.image is None else [entry.image]
        if entry.image is not None:
            entry.image = None
            del self._in_memory[uid]
            self._used_bytes -= entry.num_bytes
        return leaving

    def _let_go(self, leaving: list[AdapterImage]) -> None:
        """Give an image up, on the thread that prepares them: to undo that may take long, too."""
        if self._prepare is not None and self._executor is not None:
            with suppress(RuntimeError):  # it was shut down
                self._executor.submit(leaving.clear)

    def _forget(self, uid: AdapterUid) -> None:
        self._kept.pop(uid, None)
        self._let_go(self._take_out(uid, self._entries.pop(uid)))
        if self._disk is not None:
            self._disk.discard(uid)
