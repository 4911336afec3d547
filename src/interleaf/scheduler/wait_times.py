"""How long each sequence waits, and for what. Is told reasons and moments; decides nothing, knows no seat and no page.

A reason holds from one plan to the next, for all whose adapters stand alike. So there is a clock for each standing,
which counts seconds by the reason that holds there; a line of sequences remembers how far its adapter's clocks had come
whenever it moved from one to another, and a sequence what its line showed when it came:

    clock of COLD     |--load limit--|--load limit--|--pages--|        one addition for each standing and plan
    clock of LOADING  |---------------copied------------------|
    a line                COLD ──────────▶ LOADING ──────────▶ READY    one subtraction for each move
    a sequence          join ─────────────────────────────────▶ leave   one reading for each end

Nothing costs more the more sequences wait. Those passed over in a plan for reasons of their own are corrected one by
one: there are no more of them than seats. Moments are whole nanoseconds, so that the parts add up to the whole.
"""

from __future__ import annotations

from collections import Counter

from interleaf.core import AdapterUid
from interleaf.scheduler.sequence import Sequence, WaitReason
from interleaf.scheduler.standing import Standing

_REASONS = tuple(WaitReason)
_INDEX = {reason: index for index, reason in enumerate(_REASONS)}
_WORDS = tuple(reason.value for reason in WaitReason)
_QUEUED = _INDEX[WaitReason.QUEUED]
_NS = 10**9

_Times = list[int]
"""Nanoseconds for each of _REASONS."""


class _Clock:
    """What sequences at one standing have waited for so far, and wait for now."""

    __slots__ = ("reason", "times")

    def __init__(self) -> None:
        self.times = [0] * len(_REASONS)
        self.reason = _QUEUED


class _Line:
    """The sequences of one adapter.

    Attributes:
        clock: of its adapter's standing as of the last plan.   next_clock: of the standing now.
        offset: what it shows beyond its clock.
    """

    __slots__ = ("clock", "next_clock", "offset", "size")

    def __init__(self, clock: _Clock) -> None:
        self.clock = self.next_clock = clock
        self.offset = [0] * len(_REASONS)
        self.size = 0

    def reading(self) -> _Times:
        return [offset + time for offset, time in zip(self.offset, self.clock.times, strict=True)]

    def settle(self) -> None:
        """It shows the same as before, and goes on with the other clock."""
        before, after = self.clock.times, self.next_clock.times
        self.offset = [o + b - a for o, b, a in zip(self.offset, before, after, strict=True)]
        self.clock = self.next_clock


class WaitTimes:
    """Nanoseconds by reason, for every sequence between `join` and `leave`.

    What holds now was told with the last plan (`end_plan`), whatever has moved since. Until a sequence's first plan it
    waits for that: QUEUED.
    """

    def __init__(self) -> None:
        self._clocks = {standing: _Clock() for standing in Standing}
        self._clocks[Standing.FETCHING] = self._clocks[Standing.ASKED]
        self._ready, self._cold = self._clocks[Standing.READY], self._clocks[Standing.COLD]
        self._clocks[Standing.ASKED].reason = _INDEX[WaitReason.ADAPTER_FETCH]
        self._clocks[Standing.LOADING].reason = _INDEX[WaitReason.ADAPTER_LOAD]
        self._running = tuple({id(clock): clock for clock in self._clocks.values()}.values())
        self._lines: dict[AdapterUid | None, _Line] = {}
        self._moved: list[_Line] = []
        self._new: dict[Sequence, int] = {}  # since when, of those that no plan has seen
        self._shown: dict[Sequence, _Times] = {}  # what its line had shown when it came, of all others
        self._apart: dict[Sequence, WaitReason] = {}
        self._now = 0
        self._plan = 0  # as of the last plan

    def at(self, now_s: float) -> None:
        """So late it is now. Time never goes back."""
        self._now = max(self._now, round(now_s * _NS))

    def join(self, seq: Sequence, standing: Standing) -> None:
        """A sequence waits from its arrival on; one that has lost its seat, from now on."""
        line = self._lines.get(seq.adapter)
        if line is None:
            line = self._lines[seq.adapter] = _Line(self._clocks[standing])
        line.size += 1
        self._new[seq] = round(seq.request.arrival_s * _NS) if seq.start is None else self._now

    def move(self, uid: AdapterUid, standing: Standing) -> None:
        """An adapter stands elsewhere, as of the next plan."""
        line, clock = self._lines.get(uid), self._clocks[standing]
        if line is not None and line.next_clock is not clock:
            line.next_clock = clock
            self._moved.append(line)

    def leave(self, seq: Sequence) -> dict[str, float]:
        """A sequence waits no longer. Returns: seconds that it has waited by reason, those that are not 0."""
        waited = self.waited(seq)
        line = self._lines[seq.adapter]
        line.size -= 1
        if line.size == 0:
            del self._lines[seq.adapter]
        self._new.pop(seq, None)
        self._shown.pop(seq, None)
        self._apart.pop(seq, None)
        return waited

    def waited(self, seq: Sequence) -> dict[str, float]:
        """Seconds that a sequence has waited by reason, until now."""
        since = self._new.get(seq)
        if since is not None:
            return {_WORDS[_QUEUED]: (self._now - since) / _NS} if self._now > since else {}
        reading = self._lines[seq.adapter].reading()
        times = [now - then for now, then in zip(reading, self._shown[seq], strict=True)]
        if self._now != self._plan:
            times[_INDEX[self.reason(seq)]] += self._now - self._plan
        return {word: time / _NS for word, time in zip(_WORDS, times, strict=True) if time}

    def reason(self, seq: Sequence) -> WaitReason:
        """What a sequence waits for, as of the last plan."""
        if seq in self._new:
            return WaitReason.QUEUED
        return self._apart.get(seq) or _REASONS[self._lines[seq.adapter].clock.reason]

    def counts(self) -> Counter[WaitReason]:
        """How many wait for what, as of the last plan. Costs a walk over the lines."""
        counts = Counter(self._apart.values())
        for line in self._lines.values():
            counts[_REASONS[line.clock.reason]] += line.size
        for seq in (*self._apart, *self._new):
            counts[_REASONS[self._lines[seq.adapter].clock.reason]] -= 1
        counts[WaitReason.QUEUED] += len(self._new)
        return +counts

    # ------------------------------------------------------------------ plans

    def begin_plan(self) -> None:
        """Until now it was as the last plan has told."""
        passed = self._now - self._plan
        self._plan = self._now
        if passed:
            for clock in self._running:
                clock.times[clock.reason] += passed
            for seq, reason in self._apart.items():
                shown = self._shown[seq]
                shown[self._lines[seq.adapter].clock.reason] += passed
                shown[_INDEX[reason]] -= passed
        self._apart.clear()

    def pass_over(self, seq: Sequence, reason: WaitReason) -> None:
        """A sequence has a reason of its own, until the next plan."""
        self._apart[seq] = reason

    def end_plan(self, ready: WaitReason, cold: WaitReason) -> None:
        """From now on those whose adapter is READY, and those whose adapter is COLD, wait for this."""
        for line in self._moved:
            if line.next_clock is not line.clock:
                line.settle()
        self._moved.clear()
        self._ready.reason, self._cold.reason = _INDEX[ready], _INDEX[cold]
        for seq, since in self._new.items():
            shown = self._shown[seq] = self._lines[seq.adapter].reading()
            shown[_QUEUED] -= max(0, self._now - since)
        self._new.clear()
