"""In which order waiting sequences are considered. Knows sequences, not pages."""

from __future__ import annotations

from typing import Protocol

from interleaf.scheduler.sequence import Sequence


class Policy(Protocol):
    """Orders the waiting sequences."""

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Sort key, the least first; its last part is `seq.order`, so that no two are equal."""


class Fcfs:
    """First come, first served. A preempted sequence keeps its place."""

    def key(self, seq: Sequence) -> tuple[float, int]:
        return (0.0, seq.order)
