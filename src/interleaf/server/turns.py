"""Whose turn it is to be worked at, and who came when the queue was full. Knows turns of the event loop, no body.

A burst of thousands of requests is many seconds of work for one event loop, which does all that is there before it
looks at what has come since. Whoever asks meanwhile whether the server lives must not wait behind all of it: so a few
requests are begun in each turn of the loop, in order, and what costs little comes in between. Those that wait for their
turn have a place in the queue; for whom there was none when they came is told so in turn, before anything is parsed.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from interleaf.server.state import Queue

_NEVER_WAIT = frozenset({"/health", "/metrics"})
_GENERATIONS = frozenset({"/v1/completions", "/v1/chat/completions"})
_BEGUN_AT_A_TIME = 8
"""Requests; each takes about a millisecond until the engine has it."""

_KEY = "found_no_place"


class Turns:
    """Middleware: lets requests in, a few in each turn of the event loop."""

    def __init__(self, app: ASGIApp, queue: Queue) -> None:
        self._app = app
        self._queue = queue
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = _BEGUN_AT_A_TIME
        self._is_counting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _NEVER_WAIT:
            places = int(scope["path"] in _GENERATIONS)
            if places and self._queue.is_full:
                scope.setdefault("state", {})[_KEY] = True
                places = 0
            self._queue.num_coming += places
            try:
                await self._turn()
            finally:
                self._queue.num_coming -= places
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next_turn(self) -> None:
        """The event loop begins again: so many more, those that wait first."""
        self._left = _BEGUN_AT_A_TIME
        while self._waiting and self._left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # else it was cancelled
                waiting.set_result(None)
                self._left -= 1
        self._is_counting = self._left < _BEGUN_AT_A_TIME
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._next_turn)


def require_place(request: Request, queue: Queue) -> None:
    """Raises: ApiError: 429, there was no place for a request when it came, or there is none now."""
    if queue.is_full or request.scope.get("state", {}).get(_KEY):
        raise queue.refusal()
