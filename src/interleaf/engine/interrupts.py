"""Keeps an interrupt from the keyboard from cutting a step in half. Knows signals, nothing of engines."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptsBetweenSteps:
    """While entered, Ctrl-C waits for the next `check`; a second one strikes at once.

    Plans and seats change together, and a KeyboardInterrupt may come between any two of Python's instructions. Does
    nothing outside the main thread, which alone gets signals, or where the program handles SIGINT in its own way.
    """

    def __init__(self) -> None:
        self._is_active = False
        self._is_pending = False

    def check(self) -> None:
        """Raises: KeyboardInterrupt: one has come."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> InterruptsBetweenSteps:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
