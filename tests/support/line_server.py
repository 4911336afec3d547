"""An API process without HTTP: JSON lines over a stream socket. What a supervisor starts in tests, and its client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from interleaf.core import SamplingParams, TokenEvent
from interleaf.engine import remote
from interleaf.engine.serving import AsyncEngine
from interleaf.errors import InterleafError
from tests.support.waiting import WAIT_S

ENTRY = f"{__name__}:run"


def run(
    settings: dict[str, Any], connect: Any, sockets: Sequence[socket.socket], started: Callable[[], None], counts: Any
) -> None:
    """Answer until SIGTERM, then finish what was begun."""
    remote._RESTART_S = WAIT_S  # on a busy machine a publisher takes longer to start than users should wait for it
    asyncio.run(_serve(connect, sockets, started))


async def _serve(connect: Any, sockets: Sequence[socket.socket], started: Callable[[], None]) -> None:
    engine: AsyncEngine = await connect()
    open_requests: set[asyncio.Task[Any]] = set()
    ended: Counter[str] = Counter()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_requests.add(task)
        with suppress(ConnectionError):
            async for line in _answer(engine, json.loads(await reader.readline()), ended):
                writer.write(json.dumps(line).encode() + b"\n")
                await writer.drain()
                if reader.at_eof():  # the client has gone
                    break
        writer.close()
        open_requests.discard(task)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers = [await asyncio.start_server(answer, sock=listener) for listener in sockets]
    started()
    await stop.wait()
    for server in servers:
        server.close()
    if open_requests:
        await asyncio.wait(open_requests)
    await engine.close()


async def _answer(engine: AsyncEngine, asked: dict[str, Any], ended: Counter[str]) -> AsyncIterator[dict[str, Any]]:
    """Args: ended: how many of each kind have been answered."""
    try:
        match what := asked.pop("do"):
            case "generate":
                params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asked["max_tokens"])
                async for events in engine.generate(asked["prompt"], params, asked.get("adapter")):
                    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
                    end = "" if isinstance(events[-1], TokenEvent) else type(events[-1]).__name__
                    yield {"tokens": tokens, "end": end, "pid": os.getpid()}
            case "load":
                await engine.load_adapter(asked["name"], asked["source"])
                yield {"adapters": engine.adapters()}
            case "unload":
                await engine.unload_adapter(asked["name"])
                yield {"adapters": engine.adapters()}
            case "look":
                stats = await engine.stats() if engine.is_alive else None
                yield {
                    "pid": os.getpid(),
                    "is_alive": engine.is_alive,
                    "adapters": engine.adapters(),
                    "kv_pages": stats.pool.kv_pages if stats else None,
                    "output_tokens": stats.output_tokens if stats else None,
                    "sequences": stats.running_sequences + stats.waiting_sequences if stats else None,
                    "generated": ended["generate"],
                }
    except InterleafError as error:
        yield {"error": type(error).__name__, "message": str(error)}
    finally:
        ended[what] += 1


class LineClient:
    """Asks one thing over a connection of its own."""

    def __init__(self, port: int, **asked: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._socket.sendall(json.dumps(asked).encode() + b"\n")
        self._file = self._socket.makefile("rb")

    def line(self) -> dict[str, Any] | None:
        """The next line; None when there are no more, or the process has died."""
        try:
            text = self._file.readline()
        except ConnectionError:
            return None
        return json.loads(text) if text.endswith(b"\n") else None

    def lines(self) -> list[dict[str, Any]]:
        """All lines that are left."""
        with self:
            return list(iter(self.line, None))

    def __enter__(self) -> LineClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._socket.close()
