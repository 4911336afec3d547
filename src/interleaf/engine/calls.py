"""Questions to another process that have not been answered. Knows numbers and answers, no connection."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from interleaf.errors import InterleafError


class Calls:
    """Open calls by number, of one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the calls that wait for an answer."""
        return tuple(self._open)

    def new(self) -> tuple[int, asyncio.Future[Any]]:
        """Another call, and where its answer will be. One that nobody waits for any more is to be cancelled."""
        call, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._open[call] = future
        future.add_done_callback(lambda done: self._open.pop(call, None))
        return call, future

    def answer(self, call: int, answer: object) -> None:
        """An answer has come; an error is raised where it is awaited. Whoever asked may have gone."""
        future = self._open.get(call)
        if future is None or future.done():
            return
        if isinstance(answer, InterleafError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def fail(self, error: InterleafError) -> None:
        """No open call will be answered."""
        for call in self.open:
            self.answer(call, error)
