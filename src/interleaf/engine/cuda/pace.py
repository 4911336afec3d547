"""How long the device will still be at the steps it has, as far as the host can tell. Knows times and rows, no plan."""

from __future__ import annotations

from collections import deque

_LOOK_BACK = 32
_FEWEST = 4
"""Steps that must be known. The shortest of them counts: what is told may be too little, hardly ever too much."""

_SHARE = 0.5
"""Of that, which is promised: the host may ask late, and what is to end meanwhile may be slower than usual."""


class Pace:
    """Notes when steps were launched and found to have ended. They come in order, one after the other on the device."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, float]] = deque()
        self._took: deque[tuple[int, float]] = deque(maxlen=_LOOK_BACK)
        self._last_end_s = 0.0

    def begin(self, num_rows: int, now_s: float) -> None:
        """A step has been launched."""
        self._under_way.append((num_rows, now_s))

    def end(self, now_s: float) -> None:
        """The oldest step has ended, as the host has just found."""
        num_rows, launched_s = self._under_way.popleft()
        self._took.append((num_rows, now_s - max(launched_s, self._last_end_s)))
        self._last_end_s = now_s

    @property
    def left_s(self) -> float:
        """Seconds that the device will need at least for the last step, when that has just begun.

        0 if there is none, or if too few steps are known that were not larger.
        """
        if not self._under_way:
            return 0.0
        took = [seconds for num_rows, seconds in self._took if num_rows <= self._under_way[-1][0]]
        return _SHARE * min(took) if len(took) >= _FEWEST else 0.0
