"""Captured steps, by what they hold. Knows keys and counts; not what a step computes.

A graph is good for every step of the same key: as many padded rows, the same LoRA launches, the same way to sample.
What differs between such steps is in buffers that the graph reads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Key = tuple[Hashable, ...]
"""Of a decode step: rows, LoRA launches, way to sample. Of one in pieces: "pieces", rows, LoRA launches."""

Captured = TypeVar("Captured")


def decode_capacities(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that decode graphs are captured for; a step takes the next larger one.

    Steps of 8 up to 64, of 16 up to 256, of 32 up to 512, then of 64: at most an eighth of a batch above 64 rows is
    padding, and a base product of so few rows reads the same weights with it as without.
    """
    found = [1, 2, 4]
    while found[-1] < max_rows:
        last = found[-1]
        found.append(last + (4 if last < 8 else 8 if last < 64 else 16 if last < 256 else 32 if last < 512 else 64))
    return (*(c for c in found if c < max_rows), max_rows)


_REMEMBERED = 4096
"""Keys that were met, whether or not there is a graph for them."""

_RETRY_AFTER = 64
"""Meetings of a key until it is captured again after memory was short for the first time."""


_CAPTURE_S = 0.02
"""What a key's steps may take longer for want of a graph of their own, all together, until one is captured: about what
a capture takes. Whoever pays no more for doing without than once for doing it right pays twice the least at most."""


class _Refusal:
    """A key for which there was no memory; it is not tried for so many meetings."""

    __slots__ = ("left", "patience")

    def __init__(self, patience: int) -> None:
        self.patience = self.left = patience

    def spares(self) -> bool:
        """Count a meeting. Returns: whether it is too early to try again."""
        self.left -= 1
        return self.left >= 0


class GraphCache(Generic[Captured]):
    """What has been captured, the least recently used leaving first.

    A key is captured when it is met for the second time: the first step of a key runs kernel by kernel, which also
    compiles what is not compiled yet, and many a rare key never comes again. Where the graph of another key will do, it
    is met only when that has cost enough (`does_without`).

    Args:
        max_graphs: kept at most.

    Attributes:
        num_captures, capture_seconds: so far.
    """

    def __init__(self, max_rows: int, max_graphs: int) -> None:
        self.capacities = decode_capacities(max_rows)
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()
        self._met: OrderedDict[Key, None] = OrderedDict()  # the longest ago first
        self._refused: dict[Key, _Refusal] = {}
        self._owed_s: OrderedDict[Key, float] = OrderedDict()  # the longest ago first
        self.num_captures = 0
        self.capture_seconds = 0.0

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Give up all graphs. They are captured again as they are met."""
        self._graphs.clear()

    def capacity(self, num_rows: int) -> int:
        """The rows of the graph that takes so many."""
        return self.capacities[bisect_left(self.capacities, num_rows)]

    def find(self, key: Key) -> Captured | None:
        """The graph of a key, if there is one."""
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
        return found

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def does_without(self, key: Key, extra_s: float) -> bool:
        """Whether a step of a key that has no graph had better replay another's, which takes so much longer.

        It is counted that it does, if so. One for which there was no memory does so until it is tried again.
        """
        refusal = self._refused.get(key)
        if refusal is not None:
            return refusal.spares()
        owed_s = self._owed_s.get(key, 0.0) + extra_s
        if owed_s > _CAPTURE_S:
            return False
        self._owed_s[key] = owed_s
        self._owed_s.move_to_end(key)
        if len(self._owed_s) > _REMEMBERED:
            self._owed_s.popitem(last=False)
        return True

    def is_due(self, key: Key) -> bool:
        """Whether to capture a key that has no graph: it was met before."""
        is_due = key in self._met
        self._met[key] = None
        self._met.move_to_end(key)
        if len(self._met) > _REMEMBERED:
            forgotten, _ = self._met.popitem(last=False)
            self._refused.pop(forgotten, None)
        return is_due

    def keep(self, key: Key, capture: Callable[[], Captured]) -> Captured | None:
        """Capture a key and keep it. Everything that it launches must have been compiled.

        Others leave only afterwards: memory that graphs share would be given up with the last of them.
        Returns: None if there is no memory for it. It is tried again when the key has been met as often as the refusal
            says, twice as often each time: memory may have been short for a while, and an attempt costs a step.
        """
        refusal = self._refused.get(key)
        if refusal is not None and refusal.spares():
            return None
        began = time.perf_counter()
        try:
            captured = self._graphs[key] = capture()
        except torch.OutOfMemoryError:
            self._refused[key] = _Refusal(_RETRY_AFTER if refusal is None else 2 * refusal.patience)
            return None
        finally:
            self.capture_seconds += time.perf_counter() - began
        self._refused.pop(key, None)
        self._owed_s.pop(key, None)
        while len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        self.num_captures += 1
        return captured
