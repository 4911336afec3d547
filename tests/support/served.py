"""A server on loopback in a thread of the test's process, over a fake engine or a real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from interleaf.config import EngineConfig, ServerConfig
from interleaf.core import AdapterUid
from interleaf.engine.build import build_engine
from interleaf.engine.client import InProcessClient
from interleaf.engine.serving import AsyncEngine, EngineInfo, ThreadEngine
from interleaf.errors import AdapterNameTaken, AdapterNotFound, EngineDead
from interleaf.server.api import http_server, run_server
from interleaf.server.start import bind, url_of
from interleaf.stats import LOAD_BOUNDS_S, EngineStats, PoolStats
from tests.support.null_engine import NullEngine
from tests.support.waiting import WAIT_S

STATS = EngineStats(
    pool=PoolStats(100, 43, 30, 20, 40, 25, 4096, prefix_pages=7, peak_prefix_pages=17),
    resident_adapters=2,
    registered_adapters=3,
    running_sequences=4,
    waiting_sequences=5,
    adapter_hits=6,
    adapter_misses=7,
    adapter_loads=8,
    adapter_evictions=9,
    adapter_failed_loads=10,
    preemptions=11,
    steps=12,
    computed_tokens=13,
    output_tokens=14,
    waiting_by_reason={"pages": 2, "seats": 3},
    adapter_late_prefetches=15,
    adapter_prefetches=16,
    adapter_prefetches_unused=17,
    prefix_hit_tokens=18,
    prefix_miss_tokens=19,
    load_counts=(*[0] * (len(LOAD_BOUNDS_S) - 1), 5, 3),
    load_s=1000.0,
    adapter_pages={"a": 12, "b": 5, "c": 3},
    resumed_kept=21,
    resumed_swapped=22,
    resumed_recomputed=23,
    recomputed_tokens=24,
    swap_out_pages=25,
    swap_in_pages=26,
    swap_slots=40,
    swap_used_slots=27,
    adapter_disk_bytes=20,
    adapter_disk_files=21,
    adapter_disk_hits=22,
    adapter_disk_writes=23,
    adapter_disk_errors=24,
    copy_rate=25.0,
    prefill_rate=26.0,
)


class FakeEngine(NullEngine):
    """A NullEngine that answers 1, 2, 3, ... and keeps a table of adapters.

    Attributes:
        sources: where each adapter came from.
        refuse: raised by the next loads, if set.
        loading: loads wait while it is not set.
    """

    def __init__(self, adapters: tuple[str, ...] = (), max_model_len: int = 4096) -> None:
        super().__init__(lambda prompt, index: range(1, 101), adapters=adapters, max_model_len=max_model_len)
        self.sources = dict.fromkeys(adapters, "")
        self.refuse: Exception | None = None
        self.loading = threading.Event()
        self.loading.set()
        self.num_loading = 0

    def adapters(self) -> tuple[str, ...]:
        return tuple(self.sources)

    def has_adapter(self, name: str) -> bool:
        return name in self.adapters()

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        self.num_loading += 1
        try:
            while not self.loading.is_set():  # no thread of its own: sixteen of them would use up the event loop's
                await asyncio.sleep(0.005)
        finally:
            self.num_loading -= 1
        if self.refuse is not None:
            raise self.refuse
        if self.sources.get(name, source) != source:
            raise AdapterNameTaken(name, "0123456789abcdef")
        self.sources[name] = source
        self._adapters = self.adapters()
        return AdapterUid("0123456789abcdef")

    async def unload_adapter(self, name: str) -> None:
        if name not in self.sources:
            raise AdapterNotFound(name)
        del self.sources[name]
        self._adapters = self.adapters()

    async def stats(self) -> EngineStats:
        if not self.is_alive:
            raise EngineDead("the engine has stopped")
        return STATS


@contextmanager
def serving(
    make_engine: Callable[[], AsyncEngine] = FakeEngine,
    prepare: Callable[[AsyncEngine], Awaitable[None]] | None = None,
    **settings: object,
) -> Iterator[tuple[str, AsyncEngine]]:
    """Serve on a free port until the block ends. Yields: the server's URL, and the engine.

    Args:
        make_engine: called on the server's event loop.
        settings: fields of ServerConfig.
    """
    config = ServerConfig(model="base", **{"port": 0, "drain_timeout": 1.0, **settings})  # type: ignore[arg-type]
    listener = bind(config)
    ready = threading.Event()
    failure: list[BaseException] = []
    kept: list[object] = []

    async def main() -> None:
        engine = make_engine()
        try:
            if prepare is not None:
                await prepare(engine)
            server = http_server(engine, None, config)
            kept[:] = [engine, server]
            await run_server(server, [listener], ready.set)
        finally:
            await engine.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        assert ready.wait(WAIT_S), "the server did not start"
        if failure:
            raise failure[0]
        engine, server = kept
        yield url_of(listener), engine  # type: ignore[misc]
        server.should_exit = True  # type: ignore[attr-defined]
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not stop"
    finally:
        for server in kept[1:]:
            server.should_exit = server.force_exit = True  # type: ignore[attr-defined]
        thread.join(WAIT_S)
        listener.close()
    if failure:
        raise failure[0]


def tiny_engine(model: Path, **settings: object) -> ThreadEngine:
    """A real engine over a tiny model, on a thread. To be called on the server's event loop."""
    parts = build_engine(str(model), EngineConfig(**settings))  # type: ignore[arg-type]
    return ThreadEngine(InProcessClient(parts), EngineInfo.of(parts))


def error_of(response: httpx.Response) -> dict[str, object]:
    """The error of an answer, which must be in OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, object] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error), error
    assert error["message"], error
    return error
