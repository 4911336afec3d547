"""The host tier of a process that reads adapters itself. Knows nothing of the pool.

An adapter that is neither in host memory nor in a disk tier is made again of its source (its folder, or its seed): that
is read, checked and laid out, and must still have the uid that it was registered with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor

import torch

from interleaf.adapters.disk_tier import DiskTier
from interleaf.adapters.host_tier import HostEntry, HostTier
from interleaf.adapters.image import AdapterImage, build
from interleaf.adapters.parsed import AdapterSummary, ParsedAdapter
from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid, ModelSpec, StreamOrder
from interleaf.errors import AdapterLoadFailed, InterleafError
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard


class AdapterStore(HostTier):
    """Adapters of one rank, read and laid out here.

    Args:
        budget_bytes: of images in memory.
        order: of the streams of the images, as the device's kernels want it.
        fetch: where images are read again; None reads them inside `prepare`. It stays its owner's.
        disk, prepare: see HostTier.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        geometry: PageGeometry,
        dtype: torch.dtype,
        budget_bytes: int,
        fetch: Executor | None = None,
        *,
        order: StreamOrder = StreamOrder.ROWS,
        disk: DiskTier | None = None,
        prepare: Callable[[AdapterImage], AdapterImage] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(budget_bytes, disk=disk, prepare=prepare, executor=fetch, now=now)
        self._order = order
        self._spec = spec
        self._shard = shard
        self._geometry = geometry
        self._dtype = dtype
        self._summaries: dict[AdapterUid, AdapterSummary] = {}

    def add(self, source: str) -> AdapterUid:
        """Open, check and lay out an adapter. The same contents again, from wherever, are the same adapter.

        Raises: AdapterRejected: with every problem; nothing has changed.
        """
        parsed = open_adapter(source, self._spec)
        image = self._build(parsed)
        with self._lock:
            self._summaries[parsed.uid] = parsed.summary()
            self._register(parsed.uid, source, image)
        return parsed.uid

    def describe(self, uid: AdapterUid) -> AdapterSummary:
        """What a registered adapter is. Raises: AdapterLoadFailed: it is not registered."""
        summary = self._summaries.get(uid)
        if summary is None:
            raise AdapterLoadFailed(uid, "it is not registered")
        return summary

    def _build(self, parsed: ParsedAdapter) -> AdapterImage:
        image = build(parsed, self._shard, self._geometry, self._dtype, self._order)
        return image if self._prepare is None else self._prepare(image)

    def _fetch(self, uid: AdapterUid, entry: HostEntry) -> None:
        if self._executor is None:
            self._fetch_image(uid, entry)
            return
        try:
            self._executor.submit(self._fetch_image, uid, entry)
        except RuntimeError as error:  # the executor was shut down
            self._arrived(uid, entry, None, str(error))

    def _forget(self, uid: AdapterUid) -> None:
        super()._forget(uid)
        self._summaries.pop(uid, None)

    def _fetch_image(self, uid: AdapterUid, entry: HostEntry) -> None:
        """Make an image again; on the executor's thread, the lock is not held."""
        failures = []
        for source in tuple(entry.sources):
            try:
                parsed = open_adapter(source, self._spec)
                if parsed.uid == uid:
                    self._arrived(uid, entry, self._build(parsed), None)
                    return
                failures.append(f"{source} has changed since it was registered: it now holds adapter {parsed.uid[:12]}")
            except InterleafError as error:
                failures.append(str(error))
            except Exception as error:  # an executor keeps errors to itself, and the requests would wait for ever
                failures.append(f"{source} could not be read: {type(error).__name__}: {error}")
        self._arrived(uid, entry, None, "; ".join(failures))
