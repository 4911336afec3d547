"""How long the device will still be at the steps it has, as far as the host can tell. Knows times and rows, no plan."""

from __future__ import annotations

from collections import deque
from statistics import median

_LOOK_BACK = 32
_FEWEST = 4
"""Steps that must be known. The shortest of them counts: what is told may be too little, hardly ever too much."""

_FOR_COPIES = 0.5
"""Part of that in which copies are promised to end: they may be slower than usual."""
_FOR_WAITING = 0.75
"""Part of it that the host may let pass, but for ..."""
_LAUNCHES = 2
"""... as many launches as long as most: one must be planned, too."""


class Pace:
    """Notes when steps were launched and found to have ended. They come in order, one after the other on the device."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, float]] = deque()
        self._took: deque[tuple[int, float]] = deque(maxlen=_LOOK_BACK)
        self._launches_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._last_end_s = 0.0

    def begin(self, num_rows: int, now_s: float) -> None:
        """A step has been launched."""
        self._under_way.append((num_rows, now_s))

    def launched(self, seconds: float) -> None:
        """So long the host took to launch it."""
        self._launches_s.append(seconds)

    def end(self, now_s: float) -> None:
        """The oldest step has ended, as the host has just found."""
        num_rows, launched_s = self._under_way.popleft()
        self._took.append((num_rows, now_s - max(launched_s, self._last_end_s)))
        self._last_end_s = now_s

    def left_s(self, now_s: float) -> float:
        """Seconds in which copies will end before the device has done the last step, when all before it have ended.

        0 if there is none, or if too few steps are known that were not larger.
        """
        return self._until(_FOR_COPIES, now_s)

    def spare_s(self, now_s: float) -> float:
        """Seconds for which the host may wait before it plans the next step, likewise."""
        return max(0.0, self._until(_FOR_WAITING, now_s) - _LAUNCHES * median(self._launches_s or (0.0,)))

    def _until(self, share: float, now_s: float) -> float:
        """Seconds from now until that share of the last step's least time has passed."""
        if not self._under_way:
            return 0.0
        num_rows, launched_s = self._under_way[-1]
        took = [seconds for rows, seconds in self._took if rows <= num_rows]
        if len(took) < _FEWEST:
            return 0.0
        return max(0.0, max(launched_s, self._last_end_s) + share * min(took) - now_s)
