"""A simulated engine's host tier: adapters in memory within a budget, the others a disk read away. No bytes move."""

from __future__ import annotations

import math
from collections import OrderedDict

from interleaf.core import AdapterUid, HostState, PooledLayout
from interleaf.sim.link import Clock, Link
from interleaf.sim.shapes import AdapterShape


class SimHost:
    """What the scheduler asks of a host tier (`scheduler.HostImages`).

    Least recently used images leave first; one that is being copied to the pool stays.

    Args:
        budget_bytes: of images in memory; None: all fit and are there from the start.
        disk: reads those that are not in memory, in the order they are asked for.
    """

    def __init__(
        self,
        clock: Clock,
        shapes: dict[AdapterUid, AdapterShape],
        page_bytes: int,
        budget_bytes: float | None,
        disk: Link,
    ) -> None:
        self._clock = clock
        self._shapes = shapes
        self._page_bytes = page_bytes
        self._budget_bytes = budget_bytes
        self._disk = disk
        self._layouts = {shape: PooledLayout((), (), shape.pages, shape.num_bytes) for shape in shapes.values()}
        self._in_memory: OrderedDict[AdapterUid, int] = OrderedDict()
        self._used_bytes = 0
        self._arrives_at_s: dict[AdapterUid, float] = {}
        self._pins: dict[AdapterUid, int] = {}
        self.disk_reads = 0

    def layout(self, uid: AdapterUid) -> PooledLayout:
        return self._layouts[self._shapes[uid]]

    def prepare(self, uid: AdapterUid) -> HostState:
        if self._budget_bytes is None:
            return HostState.READY
        if uid in self._in_memory:
            self._in_memory.move_to_end(uid)
            return HostState.READY
        arrives_at_s = self._arrives_at_s.get(uid)
        if arrives_at_s is None:
            self.disk_reads += 1
            self._arrives_at_s[uid] = self._disk.send(self._clock.now, self.image_bytes(uid))
            return HostState.FETCHING
        if arrives_at_s > self._clock.now:
            return HostState.FETCHING
        del self._arrives_at_s[uid]
        self._keep(uid)
        return HostState.READY

    def failure(self, uid: AdapterUid) -> str:
        raise AssertionError(f"nothing fails here: {uid}")

    def pin(self, uid: AdapterUid) -> None:
        self._pins[uid] = self._pins.get(uid, 0) + 1

    def unpin(self, uid: AdapterUid) -> None:
        self._pins[uid] -= 1
        if not self._pins[uid]:
            del self._pins[uid]

    def image_bytes(self, uid: AdapterUid) -> int:
        """Bytes of an image: it fills whole pages."""
        return self._shapes[uid].pages * self._page_bytes

    @property
    def next_arrival_s(self) -> float:
        """When the next disk read ends; infinity if none is under way."""
        return min((moment for moment in self._arrives_at_s.values() if moment > self._clock.now), default=math.inf)

    def _keep(self, uid: AdapterUid) -> None:
        assert self._budget_bytes is not None
        self._in_memory[uid] = self.image_bytes(uid)
        self._used_bytes += self.image_bytes(uid)
        for other in list(self._in_memory):
            if self._used_bytes <= self._budget_bytes:
                break
            if other != uid and other not in self._pins:
                self._used_bytes -= self._in_memory.pop(other)
