"""In which order waiting sequences are considered. Knows sequences, not pages."""

from __future__ import annotations

from typing import Protocol

from interleaf.scheduler.sequence import Sequence


class Policy(Protocol):
    """Orders the waiting sequences."""

    def key(self, seq: Sequence) -> tuple[float, int]:
        """Sort key, the least first; its last part is `seq.order`, so that no two are equal."""


class Fcfs:
    """First come, first served. A preempted sequence comes before all that have not started.

    Somebody reads its answer already. It may have started long before its turn, because its adapter was in the pool;
    in its old place it could wait for as long as those ahead of it take.
    """

    def key(self, seq: Sequence) -> tuple[float, int]:
        return (-1.0 if seq.resume_step else 0.0, seq.order)
