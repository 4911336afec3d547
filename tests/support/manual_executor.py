"""An executor whose thread is the test: it runs what was submitted when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class ManualExecutor(Executor):
    """Attributes:
    waiting: what was submitted and has not run.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.waiting.append((fn, args, kwargs))
        return Future()

    def run_all(self) -> None:
        """Run what waits, and what that submits."""
        while self.waiting:
            fn, args, kwargs = self.waiting.pop(0)
            fn(*args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.run_all()
        self.is_shut_down = True
