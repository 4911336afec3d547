"""Who has waited for long. Knows arrivals and a moment, not reasons."""

from __future__ import annotations

from collections import deque

from interleaf.scheduler.sequence import Sequence


class LongWaits:
    """Finds the sequences that have had no seat for a while, each once; a step at which nothing is due costs O(1).

    Args:
        after_s: seconds from a request's arrival.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._not_due: deque[Sequence] = deque()

    def arrived(self, seq: Sequence) -> None:
        """A sequence waits from now on. Sequences come in order of their arrival."""
        self._not_due.append(seq)

    def due(self, now_s: float) -> list[Sequence]:
        """Those that have waited for so long since the last call, and still do."""
        found = []
        while self._not_due and self._not_due[0].request.arrival_s + self._after_s <= now_s:
            seq = self._not_due.popleft()
            if seq.is_waiting and seq.start is None:
                found.append(seq)
        return found
