"""uvicorn with limits on what comes before a request can be handled: connections, headers, their time. Knows no body.

Headers are counted where they arrive, in the protocol, because uvicorn's fast parser keeps any amount of them.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from interleaf.config import ServerConfig
from interleaf.server.open_files import HEARD, connections_at_most
from interleaf.server.refusal import error_body

_MAX_HEADERS = 128
_ACCEPTED_AT_A_TIME = 128
"""Connections that a turn of the event loop takes: it does nothing else meanwhile."""

_ALWAYS_SERVED = frozenset({b"/health", b"/metrics"})


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on what comes before a request can be handled.

    Headers are limited in bytes and number (431) and in time (408), trailers and chunk extensions in bytes; connections
    in number (503). The limits are set on a subclass by `guarded`.

    A connection over the limit is heard: it may ask whether the server lives, once. Else it is told 503 when its
    headers are there: closed before that, it would be reset, and its client might never read why. One beyond
    `most_connections` is closed at once all the same.
    """

    max_header_bytes = 32 * 1024
    header_timeout_s = 10.0
    max_connections = 1024
    most_connections = 1024 + HEARD

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._num_framing_bytes = 0  # since the start of the headers, or since the last byte of a body
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_over = len(self.connections) > self.max_connections
        if len(self.connections) > self.most_connections:
            self._refuse_connection()
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._start_deadline()
        self._num_framing_bytes += len(data)
        super().data_received(data)
        if self._num_framing_bytes > self.max_header_bytes:
            self._refuse(431, f"the headers are over the limit of {self.max_header_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The parser has all headers of a request: they may still be too many when they came in one piece."""
        self._in_headers = False
        self._num_framing_bytes = 0
        self._stop_deadline()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes or len(self.headers) > _MAX_HEADERS:
            limit = f"{self.max_header_bytes} bytes and {_MAX_HEADERS} lines"
            self._refuse(431, f"the headers are over the limit of {limit}")
        elif self._is_over and self.url.partition(b"?")[0] not in _ALWAYS_SERVED:
            self._refuse_connection()
        if not self.transport.is_closing():
            super().on_headers_complete()
            if self._is_over:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Body bytes; dropped when the headers were refused."""
        self._num_framing_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has arrived whole: the next bytes are headers again."""
        if not self.transport.is_closing():
            super().on_message_complete()
        self._in_headers = True
        self._num_framing_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of every other error."""
        self._refuse(400, msg)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._is_answering:  # the next request has begun to arrive; this one's answer goes first
            self._start_deadline()
        else:
            self._refuse(408, f"the headers did not arrive within {self.header_timeout_s:g} s")

    def _refuse_connection(self) -> None:
        self._refuse(503, f"{self.max_connections} connections are open, which is the limit", "retry-after: 1\r\n")

    def _refuse(self, status: int, message: str, more_headers: str = "") -> None:
        """Answer and close; an answer that is under way is cut."""
        self._stop_deadline()
        if self.transport.is_closing():
            return
        if self._is_answering:
            self.cycle.disconnected = True  # whatever the application still says is dropped
            self.cycle.message_event.set()
        if not (self._is_answering and self.cycle.response_started):
            body = json.dumps(error_body(status, message)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{more_headers}"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def guarded(
    max_header_bytes: int, header_timeout_s: float, max_connections: int, most_connections: int
) -> type[GuardedHttp]:
    """The protocol with these limits."""
    limits = {
        "max_header_bytes": max_header_bytes,
        "header_timeout_s": header_timeout_s,
        "max_connections": max_connections,
        "most_connections": most_connections,
    }
    return type("GuardedHttp", (GuardedHttp,), limits)


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn serves `app` under these settings. It logs nothing by itself, and trusts no proxy's headers."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=guarded(
            config.max_header,
            config.header_timeout,
            config.max_connections,
            connections_at_most(config.max_connections),
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        backlog=_ACCEPTED_AT_A_TIME,
        timeout_keep_alive=config.keep_alive,  # type: ignore[arg-type]  # handed to call_later, which takes fractions
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
    )
