"""An Entrance that keeps account of single sequences: why one waits, how its adapter was found. Decides nothing."""

from __future__ import annotations

from interleaf.scheduler.entrance import _REASONS, Entrance
from interleaf.scheduler.queue import Standing
from interleaf.scheduler.sequence import Sequence, WaitReason


class AccountableEntrance(Entrance):
    """See Entrance."""

    def reason(self, seq: Sequence) -> WaitReason:
        """What a waiting sequence that has had no seat yet waits for, as of the last plan."""
        standing = self._waiting.standing(seq.adapter)
        assert standing is not None, f"sequence {seq.owner} does not wait"
        if standing is Standing.READY:
            passed = WaitReason.PREFIX if self._passed_over[WaitReason.PREFIX] else WaitReason.QUEUED
            return self._closed_by or passed
        return self._unsent_by if standing is Standing.COLD else _REASONS[standing]

    def _count_lookup(self, seq: Sequence) -> None:
        if not seq.considered and seq.adapter is not None:
            seq.considered = True
            seq.found = self._residency.count_lookup(seq.adapter)
