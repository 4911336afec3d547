"""The waiting sequences in the policy's order, one line for each adapter. Knows where a line stands, not pages.

A sequence can start only if its adapter is in the pool, so lines are sorted by that (`Standing`), and nobody looks at a
sequence whose adapter is on its way. Of those whose adapter is READY the first may start.

Every operation costs O(log n) and a shift of a list, however many wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from interleaf.core import AdapterUid
from interleaf.scheduler.policy import Policy
from interleaf.scheduler.sequence import Sequence
from interleaf.scheduler.standing import Standing
from interleaf.scheduler.wait_times import WaitTimes

Key = tuple[float, int]


class _Line:
    """The waiting sequences of one adapter. Those passed over in this plan are not in `keys`."""

    __slots__ = ("keys", "size", "standing")

    def __init__(self, standing: Standing) -> None:
        self.keys: list[Key] = []
        self.size = 0
        self.standing = standing


class WaitingQueue:
    """Sorted by the policy's key, which must not change while a sequence waits.

    Attributes:
        times: how long each has waited, and for what.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.times = WaitTimes()
        self._keys: list[Key] = []
        self._sequences: dict[Key, Sequence] = {}
        self._lines: dict[AdapterUid | None, _Line] = {}
        self._heads: dict[Standing, list[Key]] = {standing: [] for standing in Standing}
        self._passed: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        return (self._sequences[key] for key in self._keys)

    def key(self, seq: Sequence) -> Key:
        return self._policy.key(seq)

    def push(self, seq: Sequence, standing: Standing) -> None:
        """A sequence waits from now on.

        Args:
            standing: of its adapter, if nobody else waits for that.
        """
        key = self._policy.key(seq)
        assert key not in self._sequences
        self._sequences[key] = seq
        insort(self._keys, key)
        line = self._lines.get(seq.adapter)
        if line is None:
            line = self._lines[seq.adapter] = _Line(standing)
        line.size += 1
        self._insert(line, key)
        self.times.join(seq, line.standing)

    def remove(self, seq: Sequence) -> dict[str, float]:
        """A sequence waits no longer. Returns: seconds that it has waited, by reason."""
        key = self._policy.key(seq)
        del self._sequences[key]
        del self._keys[bisect_left(self._keys, key)]
        line = self._lines[seq.adapter]
        if seq in self._passed:
            self._passed.remove(seq)
        else:
            self._take_out(line, key)
        line.size -= 1
        if line.size == 0:
            del self._lines[seq.adapter]
        return self.times.leave(seq)

    def move(self, uid: AdapterUid, standing: Standing) -> None:
        """An adapter stands elsewhere now, and with it those that wait for it, if any do."""
        line = self._lines.get(uid)
        if line is None or line.standing is standing:
            return
        if line.keys:
            _remove(self._heads[line.standing], line.keys[0])
            insort(self._heads[standing], line.keys[0])
        line.standing = standing
        self.times.move(uid, standing)

    def first(self, *standings: Standing) -> Sequence | None:
        """The first in line whose adapter stands at one of these."""
        heads = [self._heads[standing][0] for standing in standings if self._heads[standing]]
        return self._sequences[min(heads)] if heads else None

    def standing(self, uid: AdapterUid | None) -> Standing | None:
        """Where the adapter stands that somebody waits for; None if nobody does."""
        line = self._lines.get(uid)
        return None if line is None else line.standing

    def pass_over(self, seq: Sequence) -> None:
        """Leave out the first of a line until `end_pass`, so that the one behind it is the first."""
        self._passed.append(seq)
        self._take_out(self._lines[seq.adapter], self._policy.key(seq))

    def end_pass(self) -> None:
        """Whoever was passed over is back in line."""
        for seq in self._passed:
            self._insert(self._lines[seq.adapter], self._policy.key(seq))
        self._passed.clear()

    def waiting_for(self, uid: AdapterUid | None) -> list[Sequence]:
        """Those that wait for an adapter, in order. Costs a walk over its line."""
        line = self._lines.get(uid)
        keys = [] if line is None else line.keys
        passed = [self._policy.key(seq) for seq in self._passed if seq.adapter == uid]
        return [self._sequences[key] for key in sorted(keys + passed)]

    def place(self, seq: Sequence) -> int:
        """How many are ahead of it."""
        return bisect_left(self._keys, self._policy.key(seq))

    def far_behind(self, place: int) -> Iterator[AdapterUid]:
        """Adapters in the pool whose whole line has at least `place` sequences ahead, the furthest behind first.

        The queue must not change meanwhile.
        """
        return self.overtakable(self._sequences[self._keys[place - 1]]) if place <= len(self._keys) else iter(())

    def overtakable(self, seq: Sequence | None) -> Iterator[AdapterUid]:
        """Adapters in the pool whose whole line is behind a sequence (None: ahead of all), the furthest behind first.

        The queue must not change meanwhile.
        """
        heads = self._heads[Standing.READY]
        first = 0 if seq is None else bisect_right(heads, self._policy.key(seq))
        for index in range(len(heads) - 1, first - 1, -1):
            uid = self._sequences[heads[index]].adapter
            if uid is not None:
                yield uid

    def _insert(self, line: _Line, key: Key) -> None:
        heads = self._heads[line.standing]
        first = line.keys[0] if line.keys else None
        insort(line.keys, key)
        if first is None or key < first:
            if first is not None:
                _remove(heads, first)
            insort(heads, key)

    def _take_out(self, line: _Line, key: Key) -> None:
        heads = self._heads[line.standing]
        if line.keys[0] == key:
            del line.keys[0]
            _remove(heads, key)
            if line.keys:
                insort(heads, line.keys[0])
        else:
            _remove(line.keys, key)


def _remove(keys: list[Key], key: Key) -> None:
    index = bisect_left(keys, key)
    assert keys[index] == key
    del keys[index]
