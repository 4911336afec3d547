"""One process's HTTP server over an engine, wherever that runs: observe it, build the app, run uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from interleaf.config import ServerConfig
from interleaf.engine.serving import AsyncEngine
from interleaf.engine.supervisor import BACKLOG
from interleaf.engine.tokenizer import Tokenizer, load_tokenizer
from interleaf.engine.worker import Connect
from interleaf.server.app import create_app
from interleaf.server.label_table import LabelTable
from interleaf.server.logs import configure_logging, log_fields
from interleaf.server.metrics import Metrics
from interleaf.server.observed import ObservedEngine
from interleaf.server.operation import operation
from interleaf.server.protocol import uvicorn_config
from interleaf.server.totals import Totals

logger = logging.getLogger(__name__)


def http_server(
    engine: AsyncEngine, tokenizer: Tokenizer | None, config: ServerConfig, counts: Path | None = None
) -> uvicorn.Server:
    """A server that has everything but its sockets.

    Args:
        counts: the file of this process's counts, beside those of the other API processes; None: there are no others.

    Raises: ConfigError: an adapter root is no folder.
    """
    metrics = Metrics(config.name, LabelTable(config.metrics_adapters, counts and counts.with_name("labels")))
    totals = Totals(metrics, config.name, counts)
    app = create_app(ObservedEngine(engine, metrics), tokenizer, config, [operation(config, metrics, totals)])
    return _Server(uvicorn_config(app, config), totals, counts.stem if counts else "api", config.drain_timeout)


async def run_server(server: uvicorn.Server, listeners: Sequence[socket.socket], on_ready: Callable[[], None]) -> None:
    """Serve until asked to stop; `on_ready` is called once requests are answered."""
    serving = asyncio.create_task(server.serve(sockets=list(listeners)))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        on_ready()
    await serving


def work(
    settings: dict[str, Any],
    connect: Connect,
    listeners: Sequence[socket.socket],
    on_ready: Callable[[], None],
    counts: Path,
) -> None:
    """What an API process does (`engine.worker.Entry`). `settings` are ServerConfig's fields as plain values."""
    config = ServerConfig(**settings | {"adapters": dict(settings["adapters"])})
    configure_logging(config.log_format, config.log_level)
    asyncio.run(_work(config, connect, listeners, on_ready, counts))


async def _work(
    config: ServerConfig,
    connect: Connect,
    listeners: Sequence[socket.socket],
    on_ready: Callable[[], None],
    counts: Path,
) -> None:
    engine = await connect()
    try:
        tokenizer = load_tokenizer(config.tokenizer or config.model)
        await run_server(http_server(engine, tokenizer, config, counts), listeners, on_ready)
    finally:
        await engine.close()


class _Server(uvicorn.Server):
    """uvicorn's server. SIGTERM and SIGINT let it finish what it has begun, a second one ends it; the process then ends
    as any other does, where uvicorn would have the signal kill it. Counts are written while it serves.

    Args:
        process: which of the API processes this is, for the log.
    """

    def __init__(self, config: uvicorn.Config, totals: Totals, process: str, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._totals = totals
        self._process = process
        self._drain_timeout_s = drain_timeout_s
        self._cut: set[asyncio.Task[None]] = set()  # requests that the second signal found open, however they end
        logging.getLogger("uvicorn.error").addFilter(_is_no_cut_request)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, whose backlog is both: what the kernel keeps, and what is accepted at a time."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        writing = asyncio.create_task(self._totals.keep_written())
        try:
            await super().serve(sockets)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn. The log says how many requests are open when it begins, and how many of them were cut."""
        begun_s = time.perf_counter()
        requests = self._open_requests() | self._cut
        logger.info(
            "stopping: no new connection is taken",
            extra=log_fields(process=self._process, open_requests=len(requests), drain_timeout_s=self._drain_timeout_s),
        )
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves it out, and shows where it was when the loop ends
            await self.lifespan.shutdown()
        cut = len(self._cut | {task for task in requests if not task.done() or task.cancelling()})
        logger.log(
            logging.WARNING if cut else logging.INFO,
            "open requests are cut" if cut else "drained",
            extra=log_fields(process=self._process, cut_requests=cut, seconds=round(time.perf_counter() - begun_s, 2)),
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self._cut |= self._open_requests()
        self.force_exit = self.should_exit
        self.should_exit = True

    def _open_requests(self) -> set[asyncio.Task[None]]:
        return {task for task in self.server_state.tasks if not task.done()}


def _is_no_cut_request(record: logging.LogRecord) -> bool:
    """uvicorn shows a stack for each request that is cut, as if it had failed; `_Server.shutdown` counts them."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
