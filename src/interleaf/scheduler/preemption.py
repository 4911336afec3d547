"""Who loses its seat when pages run out. Knows sequences; how a seat is taken away is the scheduler's business."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from interleaf.scheduler.sequence import Sequence


class Preemption(Protocol):
    """Chooses among the seated sequences."""

    def victim(self, seated: Iterable[Sequence]) -> Sequence:
        """The one to be computed again later. It must be the last in some fixed order, or two could take turns."""


class LatestArrival:
    """The sequence that arrived last: whoever is ahead in line is never set back by those behind."""

    def victim(self, seated: Iterable[Sequence]) -> Sequence:
        return max(seated, key=lambda seq: seq.order)
