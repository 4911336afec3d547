"""Moves adapters' images into their pages and says when they are there. Decides nothing; chooses no page.

Two orderings must hold around a copy: a step must not read pages before their copy has ended, and a copy must not write
into recycled pages while a step still reads them. `AdapterCopier` makes plain copies, on the thread that also executes
steps and in the order of the plans: both hold because that thread does one thing after another. `StreamCopier` copies
beside the steps: a copy begins after an event that follows all steps launched so far, and is reported, so that steps
may read the pages, when its own event has passed; or before, if it will have by the time that the next step begins,
and that step is made to wait for the event (docs/adr/0019-copies-handed-over-early.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterLoad, AdapterUid, PooledLayout
from interleaf.errors import InterleafError
from interleaf.memory.pool import PagePool


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One adapter's copy has ended, or all later steps wait until it has.

    Attributes:
        error: why the pages do not hold the adapter; None: later steps may read it.
    """

    uid: AdapterUid
    error: str | None = None


class AdapterCopier:
    """Copies into one pool. `copy` belongs to the thread that executes steps; `poll` may be called from another.

    Args:
        image: the image of an adapter that its caller keeps in memory until the copy is reported.
    """

    def __init__(self, pool: PagePool, image: Callable[[AdapterUid], AdapterImage]) -> None:
        self._pool = pool
        self._image = image
        self._ended: deque[LoadReport] = deque()

    def copy(self, load: AdapterLoad) -> PooledLayout | None:
        """Fill an adapter's pages, all layers of a page in one contiguous copy.

        Returns: where everything lies in them; None if the image could not be had, which `poll` then explains.
        """
        try:
            image = self._image(load.uid)
        except InterleafError as error:  # one adapter's trouble: the step goes on without it
            self._ended.append(LoadReport(load.uid, str(error)))
            return None
        assert image.layout.pages == len(load.pages), f"{image.layout.pages} pages of image for {len(load.pages)}"
        if load.pages:
            pages = torch.tensor(load.pages, device=self._pool.lanes.device)
            self._pool.lanes.index_copy_(0, pages, image.data)
        self._ended.append(LoadReport(load.uid))
        return image.layout

    def poll(self) -> list[LoadReport]:
        """Copies that have ended since the last call, in order."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


class CopyEvent(Protocol):
    """A point in a stream's work."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def wait(self) -> None: ...


class CopyDevice(Protocol):
    """What copying beside the steps takes of a device."""

    def copying(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the copy stream."""

    def event(self) -> CopyEvent: ...


@dataclass(slots=True)
class _UnderWay:
    """A copy that has been enqueued; its image's memory is kept until it has ended.

    Attributes:
        may_begin: an event after which nothing reads the pages any more, so that the copy begins.
        failure: why a part of it was refused. What was enqueued before still writes to the pages.
        is_reported: it was, ahead of its end.
    """

    uid: AdapterUid
    image: AdapterImage
    may_begin: CopyEvent
    ended: CopyEvent
    failure: str | None = None
    is_reported: bool = False


class StreamCopier:
    """Copies into one pool on a stream of its own. All methods belong to the thread that launches steps.

    Copies are as fast as the link where images are in pinned memory; from other memory they are staged by the driver,
    and the launching thread waits for them.

    Args:
        image: the image of an adapter that its caller keeps in memory until the copy is reported.
    """

    def __init__(self, pool: PagePool, image: Callable[[AdapterUid], AdapterImage], device: CopyDevice) -> None:
        self._pool = pool
        self._image = image
        self._device = device
        self._under_way: deque[_UnderWay] = deque()
        self._failed: list[LoadReport] = []

    def copy(self, load: AdapterLoad) -> PooledLayout | None:
        """Enqueue an adapter's copy behind all that is on the current stream, all layers of a page at once.

        A copy that the driver refuses is one load's failure. Of what goes wrong later, while a device works, CUDA does
        not tell whose it was, and nothing can be done with the device from then on: that raises, here or in `poll`.

        Returns: where everything will lie; None if the image could not be had or its copy was refused, which `poll`
            then explains.
        """
        try:
            image = self._image(load.uid)
        except InterleafError as error:  # one adapter's trouble: the step goes on without it
            self._failed.append(LoadReport(load.uid, str(error)))
            return None
        assert image.layout.pages == len(load.pages), f"{image.layout.pages} pages of image for {len(load.pages)}"
        launched, ended = self._device.event(), self._device.event()
        launched.record()
        failure = None
        with self._device.copying():
            launched.wait()
            try:
                for first, page, count in _runs(load.pages):
                    self._pool.lanes[page : page + count].copy_(image.data[first : first + count], non_blocking=True)
            except RuntimeError as error:  # torch's word for it
                failure = f"adapter {load.uid[:12]} could not be copied to the device: {error}"
            ended.record()  # and here it is told whether the device still works
        self._under_way.append(_UnderWay(load.uid, image, launched, ended, failure))
        return None if failure else image.layout

    def poll(self, soon_pages: int = 0) -> list[LoadReport]:
        """Copies that have ended since the last call, in order, and those that are about to.

        Args:
            soon_pages: as many pages of those under way as will have been copied when the next step begins, if nothing
                but the link holds them up. What is enqueued on the current stream from now on waits for the copies
                among them, which are reported. A copy that has yet to wait for a step, and all behind it, are not.
        """
        reports, self._failed = self._failed, []
        while self._under_way and self._under_way[0].ended.query():
            copy = self._under_way.popleft()
            if not copy.is_reported:
                reports.append(LoadReport(copy.uid, copy.failure))
        for copy in self._under_way:
            soon_pages -= copy.image.layout.pages
            if soon_pages < 0 or not copy.may_begin.query():
                break
            if not copy.is_reported and copy.failure is None:
                copy.ended.wait()
                copy.is_reported = True
                reports.append(LoadReport(copy.uid))
        return reports

    @property
    def num_under_way(self) -> int:
        """Copies that have not ended, as far as `poll` has found."""
        return len(self._under_way) + len(self._failed)

    def wait(self) -> bool:
        """Wait for the oldest copy under way. Returns: whether there was one."""
        if self._under_way:
            self._under_way[0].ended.synchronize()
        return bool(self._under_way)

    def close(self) -> None:
        """Wait for every copy."""
        while self.wait():
            self._under_way.popleft()


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in `pages`, page, count) of each run of neighbouring pages."""
    first = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1:
            yield first, pages[first], at - first
            first = at
