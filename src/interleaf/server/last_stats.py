"""The engine's snapshot for `/metrics`, the last one if the engine does not answer in time. Knows no metric.

An engine answers between two steps. While a step hangs, an operator wants to see how things stood before, and that they
are not how they stand now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from interleaf.engine.serving import AsyncEngine
from interleaf.errors import EngineDead
from interleaf.stats import EngineStats

LIMIT_S = 2.0
"""A scrape waits so long for the engine. Prometheus gives up on a scrape after 10 s by default."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine as it was `age_s` ago.

    Attributes:
        stats: None: it has not answered once, or has stopped.
        age_s: without stats, since when it has been asked in vain.
    """

    stats: EngineStats | None
    age_s: float
    is_up: bool


class LastStats:
    """Asks the engine, once however many want to know. Lives on the event loop.

    Args:
        limit_s: for it to answer.
        now: seconds, monotonic.
    """

    def __init__(
        self, engine: AsyncEngine, limit_s: float = LIMIT_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._now = now
        self._stats: EngineStats | None = None
        self._as_of_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def look(self) -> Snapshot:
        """The engine now, or as it was last seen if it does not answer within the limit."""
        if self._asking is None:
            if self._as_of_s is None:
                self._as_of_s = self._now()
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        await asyncio.wait((asking,), timeout=self._limit_s)
        if asking.done():
            asking.result()  # what was raised is raised here, too
        if not self._engine.is_alive:
            return Snapshot(None, 0.0, is_up=False)
        assert self._as_of_s is not None
        return Snapshot(self._stats, self._now() - self._as_of_s, is_up=True)

    async def _ask(self) -> None:
        try:
            self._stats = await self._engine.stats()
            self._as_of_s = self._now()
        except EngineDead:
            self._stats = None
        finally:
            self._asking = None
