"""A real HTTP server on loopback, on a thread of the test: uvicorn, and whatever application a test has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from interleaf.engine.serving import AsyncEngine
from tests.support.waiting import WAIT_S

T = TypeVar("T")


class LocalServer:
    """Serves until the `with` block ends. Engine and application live on the server's event loop.

    Args:
        build: makes them there, once the loop runs.

    Attributes:
        url: where the server answers.
        engine: to be used by `call` only.
    """

    def __init__(self, build: Callable[[], Awaitable[tuple[FastAPI, AsyncEngine]]]) -> None:
        self._build = build
        self._started: Future[None] = Future()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="server", daemon=True)

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine that runs on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(2 * WAIT_S)

    def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait on the server's loop until something holds. Raises: TimeoutError."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT_S):
                while not await holds():
                    await asyncio.sleep(0.005)

        self.call(wait)

    def __enter__(self) -> LocalServer:
        self._thread.start()
        self._started.result(WAIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._socket.close()
        assert not self._thread.is_alive(), "the server did not stop"

    async def _run(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
            app, self.engine = await self._build()
            config = uvicorn.Config(app, http="httptools", log_level="error", access_log=False)
            config.timeout_graceful_shutdown = 1
            self._server = uvicorn.Server(config)
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
        except BaseException as failure:
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            await self.engine.close()
