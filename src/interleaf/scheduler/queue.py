"""The waiting sequences in the policy's order. Knows nothing of why they wait."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from interleaf.scheduler.policy import Policy
from interleaf.scheduler.sequence import Sequence


class WaitingQueue:
    """Sorted by the policy's key, which must not change while a sequence waits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: list[tuple[float, int]] = []
        self._sequences: dict[tuple[float, int], Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Sequences may be removed meanwhile, but none added."""
        position = 0
        while position < len(self._keys):
            key = self._keys[position]
            yield self._sequences[key]
            position = bisect_right(self._keys, key)

    def push(self, seq: Sequence) -> None:
        key = self._policy.key(seq)
        assert key not in self._sequences
        insort(self._keys, key)
        self._sequences[key] = seq

    def remove(self, seq: Sequence) -> None:
        key = self._policy.key(seq)
        del self._sequences[key]
        del self._keys[bisect_left(self._keys, key)]
