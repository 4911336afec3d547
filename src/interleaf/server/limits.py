"""How large a request's body may be, and how slowly it may come. Knows bytes and seconds, no endpoint.

A body is handed on only when all of it is there: no handler ever waits for a slow client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interleaf.server.refusal import refusal

_DISCARDED_BYTES = 64 * 1024 * 1024
"""Of a body that is too large, read and dropped before the answer: most clients write all of it before they read."""


class LimitBody:
    """Middleware: a body over `max_bytes` is answered 413, by its Content-Length or once that much has come; one that
    takes longer than `timeout_s` is answered 408. The connection is closed after both.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._check_length(scope)
                async for _ in body.parts():
                    if body.size > self._max_bytes:
                        raise _TooLarge(f"more than {self._max_bytes} bytes")
        except _TooLarge as too_large:
            if not _expects_continue(scope):
                await body.discard(_DISCARDED_BYTES, self._timeout_s)
            message = f"the body has {too_large}, at most {self._max_bytes} bytes are accepted"
            answer = refusal(413, message, code="body_too_large", headers={"Connection": "close"})
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            answer = refusal(408, message, code="body_too_slow", headers={"Connection": "close"})
        else:
            if not body.is_cut:
                await self._app(scope, _replay(body.content(), receive), send)
            return
        await answer(scope, receive, send)

    def _check_length(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                raise _TooLarge(f"{int(value)} bytes")


class _TooLarge(Exception):
    pass


class _Body:
    """A body on its way in.

    Attributes:
        size: bytes that have come.
        is_cut: the client went away before the end.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []
        self._is_whole = False
        self.size = 0
        self.is_cut = False

    async def parts(self) -> AsyncIterator[bytes]:
        """What comes, until the end."""
        while not self._is_whole and not self.is_cut:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_cut = True
                return
            part = message.get("body", b"")
            self.size += len(part)
            self._parts.append(part)
            self._is_whole = not message.get("more_body", False)
            yield part

    def content(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)

    async def discard(self, max_bytes: int, timeout_s: float) -> None:
        """Read on and keep nothing, within limits."""
        self._parts.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                async for _ in self.parts():
                    self._parts.clear()
                    if self.size > max_bytes:
                        return


def _expects_continue(scope: Scope) -> bool:
    """Whether the client waits for a word before it sends the body."""
    return any(name == b"expect" for name, _ in scope["headers"])


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once, and then what the connection says."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
