"""`RemoteEngine`: the engine of another process behind the contract of `AsyncEngine`. Names live here, uids travel.

Requests go to the engine, adapters to the publisher (`remote_publisher`), of whose table of names this process keeps a
copy; a request whose adapter was withdrawn on the way is resolved again.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from interleaf.core import AdapterUid, Event, RequestFailed, SamplingParams
from interleaf.engine import messages as m
from interleaf.engine.calls import Calls
from interleaf.engine.channel import ENGINE_SOCKET, AsyncLink
from interleaf.engine.client import check_request
from interleaf.engine.remote_publisher import RemotePublisher
from interleaf.engine.serving import EngineInfo, Inbox, OnLeft
from interleaf.errors import AdapterNotFound, EngineDead, InterleafError, RequestRejected
from interleaf.stats import EngineStats

_CONNECT_S = 30.0

_LAST_WORDS_S = 0.5
"""What a dying engine has sent is read before its requests are failed for it."""

_FROM_ENGINE = msgspec.msgpack.Decoder(m.ToApi)


class RemoteEngine:
    """An engine and a publisher in other processes. Its methods are called from one event loop.

    Made by `connect`.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._info: EngineInfo | None = None
        self._stopped: str | None = None  # why, once the engine has stopped
        self._ids = itertools.count()
        self._prefix = uuid.uuid4().hex[:12]
        self._inboxes: dict[str, Inbox] = {}
        self._calls = Calls()
        self._engine: AsyncLink | None = None
        self._publisher = RemotePublisher(run, self._start)
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, run: str | Path) -> RemoteEngine:
        """Reach the engine and the publisher of a run.

        Args:
            run: the folder of their sockets.

        Raises: EngineDead: one of them is not there.
        """
        self = cls(Path(run))
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._open()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):  # nobody answers, or not in time
                raise EngineDead(str(error) or "the engine process does not answer") from error
            raise
        return self

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._stopped is None

    def adapters(self) -> tuple[str, ...]:
        """Names that `generate` accepts."""
        return tuple(self._publisher.names)

    def has_adapter(self, name: str) -> bool:
        """Whether `generate` accepts a name."""
        return name in self._publisher.names

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        on_left: OnLeft | None = None,
    ) -> AsyncIterator[list[Event]]:
        """See AsyncEngine."""
        check_request(prompt_token_ids, params, self.info.vocab_size, self.info.max_model_len)
        inbox = self._submit(prompt_token_ids, params, adapter, cache_salt)
        try:
            try:
                events = await inbox.take()
            except _Stale:
                await self._publisher.read_names()
                inbox = self._submit(prompt_token_ids, params, adapter, cache_salt)
                events = await _take_or_not_found(inbox, adapter)
            yield events
            while not inbox.ended:
                yield await inbox.take()
        finally:
            if not inbox.ended:
                self._leave(inbox, on_left)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See AsyncEngine."""
        if request_id in self._inboxes and self._engine is not None:
            self._engine.send(m.encode(m.Abort(request_id, index)))

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        """See AsyncEngine. Raises, too: AdaptersUnavailable."""
        return await self._publisher.load(name, source)

    async def unload_adapter(self, name: str) -> None:
        """See AsyncEngine. Raises, too: AdaptersUnavailable."""
        await self._publisher.unload(name)

    async def stats(self) -> EngineStats:
        """See AsyncEngine."""
        self._require_alive()
        assert self._engine is not None
        call, future = self._calls.new()
        self._engine.send(m.encode(m.AskStats(call)))
        stats: EngineStats = await future
        pages = stats.adapter_pages  # by uid, which is all that the engine knows
        found = {uid: name for name, uid in reversed(self._publisher.names.items()) if uid in pages}
        return replace(stats, adapter_pages={name: pages[uid] for uid, name in found.items()})

    async def close(self) -> None:
        """End this process's requests and its connections. The engine runs on."""
        self._stop("the connection to the engine was closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._publisher.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # ------------------------------------------------------------------ requests

    def _submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, adapter: str | None, cache_salt: str | None
    ) -> Inbox:
        """Raises: AdapterNotFound, EngineDead, RequestRejected."""
        self._require_alive()
        assert self._engine is not None
        uid = None
        if adapter is not None:
            uid = self._publisher.names.get(adapter)
            if uid is None:
                raise AdapterNotFound(adapter)
        inbox = Inbox(f"{self._prefix}-{next(self._ids)}")
        assert inbox.request_id is not None
        try:
            data = m.encode(m.Submit(inbox.request_id, tuple(prompt_token_ids), params, uid, cache_salt))
        except OverflowError:
            raise RequestRejected("a number of the sampling parameters is beyond 64 bits") from None
        self._engine.send(data)
        self._inboxes[inbox.request_id] = inbox
        return inbox

    def _leave(self, inbox: Inbox, on_left: OnLeft | None) -> None:
        """Nobody reads a request any more. It is kept until the engine says how it ended."""
        assert inbox.request_id is not None
        inbox.leave(on_left)
        if inbox.request_id in self._inboxes and self._engine is not None:
            self._engine.send(m.encode(m.Abort(inbox.request_id, None)))

    def _require_alive(self) -> None:
        if self._stopped is not None:
            raise EngineDead(self._stopped)

    def _stop(self, reason: str) -> None:
        """From now on nothing is accepted; what is open ends."""
        if self._stopped is None:
            self._stopped = reason
        while self._inboxes:
            request_id, inbox = self._inboxes.popitem()
            inbox.put([RequestFailed(request_id, self._stopped)])
        self._calls.fail(EngineDead(self._stopped))
        self._publisher.stop(self._stopped)

    # ------------------------------------------------------------------ the two connections

    async def _open(self) -> None:
        self._engine = await AsyncLink.open(str(self._run / ENGINE_SOCKET))
        self._engine.send(m.encode(m.Hello("api")))
        welcome = _FROM_ENGINE.decode(await self._engine.receive())
        if isinstance(welcome, m.Stopping):
            raise ConnectionError(welcome.reason)
        assert isinstance(welcome, m.Welcome), welcome
        self._info = welcome.info
        self._start(self._hear_engine(self._engine))
        self._start(self._watch_engine(self._engine))
        await self._publisher.open()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing is heard any more, if a task has failed: whoever waits must not wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._stop(f"the connection to the engine has failed: {task.exception()!r}")

    async def _hear_engine(self, link: AsyncLink) -> None:
        while True:
            message = _FROM_ENGINE.decode(await link.receive())
            match message:
                case m.Events():
                    self._deliver(message)
                case m.Refused():
                    inbox = self._inboxes.pop(message.request_id, None)
                    if inbox is not None:
                        error = message.error.exception()
                        inbox.refuse(_Stale(str(error)) if message.is_stale else error)
                case m.Stats(call, stats):
                    self._calls.answer(call, stats)
                case m.Stopping(reason):
                    self._stop(reason)

    def _deliver(self, message: m.Events) -> None:
        batches: dict[str, list[Event]] = {}
        for waiting in message.waiting:
            batches[waiting.request_id] = [waiting]
        for token in message.tokens:
            batches.setdefault(token.request_id, []).append(token)
        for request_id, events in batches.items():
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put(events)
        ends: tuple[Event, ...] = (*message.finished, *message.aborted, *message.failed)
        for end in ends:
            inbox = self._inboxes.pop(end.request_id, None)
            if inbox is not None:
                inbox.put([end])

    async def _watch_engine(self, link: AsyncLink) -> None:
        await link.died()
        if self._stopped is None:
            self._stopped = "the engine process has died"
        await asyncio.sleep(_LAST_WORDS_S)
        self._stop(self._stopped)


class _Stale(InterleafError):
    """The adapter of a request was withdrawn while it travelled."""


async def _take_or_not_found(inbox: Inbox, adapter: str | None) -> list[Event]:
    try:
        return await inbox.take()
    except _Stale:
        raise AdapterNotFound(str(adapter)) from None
