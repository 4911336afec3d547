"""Time as the simulator keeps it, and wires that carry one thing after another. Knows bytes, not what they are."""

from __future__ import annotations


class Clock:
    """The moment that the host has reached, in seconds. Calling it gives the time, as `time.monotonic` does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def reach(self, moment_s: float) -> None:
        """Wait until then; a moment that has passed takes no wait."""
        if moment_s > self.now:
            self.now = moment_s


class Link:
    """One wire: transfers go in the order they were asked for, each at the full rate, beside whatever is computed.

    Args: start_s: what a transfer costs beside its bytes.
    """

    def __init__(self, bytes_s: float, start_s: float = 0.0) -> None:
        assert bytes_s > 0, bytes_s
        self._bytes_s = bytes_s
        self._start_s = start_s
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def send(self, ready_s: float, num_bytes: float) -> float:
        """Queue a transfer that may begin at `ready_s`. Returns: when it ends."""
        duration_s = self._start_s + num_bytes / self._bytes_s
        self._free_at_s = max(self._free_at_s, ready_s) + duration_s
        self.busy_s += duration_s
        return self._free_at_s
