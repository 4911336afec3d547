"""An engine as a server sees it: asynchronous, by names, never blocking the event loop. No HTTP, no text.

`AsyncEngine` is the contract. `ThreadEngine` runs an `EngineClient` on a thread of this process, step after step;
an engine in a process of its own answers the same calls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from interleaf.core import NOT_TERMINAL, AdapterUid, Event, RequestFailed, SamplingParams
from interleaf.engine.client import EngineClient
from interleaf.errors import EngineDead
from interleaf.stats import EngineStats

if TYPE_CHECKING:  # it imports torch, and API processes have none
    from interleaf.engine.build import EngineParts

T = TypeVar("T")

OnLeft = Callable[[Event], None]
"""Hears what is still said of a request that nobody reads any more: at last, how it ended."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What never changes while an engine runs.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: prompt + max_tokens at most.
        eos_token_ids: tokens that end a sequence unless `ignore_eos`.
        prefix_cache: whether requests that begin alike share what they have in common.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    prefix_cache: bool = False

    @classmethod
    def of(cls, parts: EngineParts) -> EngineInfo:
        """What an engine that was just built says of itself."""
        spec = parts.spec
        config = parts.config
        return cls(spec.vocab_size, parts.max_model_len, spec.eos_token_ids, config.max_num_seqs, config.prefix_cache)


class AsyncEngine(Protocol):
    """Every request ends in exactly one terminal event, whatever happens to the engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""

    def adapters(self) -> tuple[str, ...]:
        """Names that `generate` accepts."""

    def has_adapter(self, name: str) -> bool:
        """Whether `generate` accepts a name, however many there are."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        on_left: OnLeft | None = None,
    ) -> AsyncIterator[list[Event]]:
        """Events of one request as they come, several at a time under backlog; the last one is terminal.

        Args:
            cache_salt: only requests of the same salt share cached prefixes.
            on_left: called with what comes when the reader has left, and with what has come and was not read.

        Leaving the iterator early (`aclose`, cancellation) ends the request.
        Raises, before the first events: RequestRejected, AdapterNotFound, EngineDead.
        """

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sequence of it; does not wait."""

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        """Register an adapter. Raises: AdapterRejected, AdapterNameTaken, PoolTooSmall."""

    async def unload_adapter(self, name: str) -> None:
        """Take a name away; running requests keep the adapter. Raises: AdapterNotFound."""

    async def stats(self) -> EngineStats:
        """The engine at this moment. Raises: EngineDead."""

    async def close(self) -> None:
        """End every request and release everything."""


class ThreadEngine:
    """An engine on a thread of this process. Its methods are called from one event loop.

    What is asked is queued and done between two steps, in the order it was asked. So an abort that follows a submit
    finds the request, even if whoever submitted it was cancelled before the answer came.

    Args:
        client: owned by the thread from now on, closed with it.
    """

    def __init__(self, client: EngineClient, info: EngineInfo) -> None:
        self._client = client
        self._info = info
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._closing = threading.Event()
        self._gate = threading.Lock()  # nothing is queued after the thread has answered what was queued last
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._closing.is_set() and self._client.is_alive

    def adapters(self) -> tuple[str, ...]:
        """See AsyncEngine."""
        return self._client.adapters()

    def has_adapter(self, name: str) -> bool:
        """See AsyncEngine."""
        return self._client.has_adapter(name)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        on_left: OnLeft | None = None,
    ) -> AsyncIterator[list[Event]]:
        """See AsyncEngine."""
        inbox = Inbox()
        try:
            await self._call(lambda: self._submit(inbox, prompt_token_ids, params, adapter, cache_salt))
            while not inbox.ended:
                yield await inbox.take()
        finally:
            if not inbox.ended:
                inbox.leave(on_left)
                self._post(lambda: self._abandon(inbox))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See AsyncEngine."""
        self._post(lambda: self._client.abort(request_id, index))

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        """See AsyncEngine."""
        return await self._call(lambda: self._client.add_adapter(name, source))

    async def unload_adapter(self, name: str) -> None:
        """See AsyncEngine."""
        await self._call(lambda: self._client.remove_adapter(name))

    async def stats(self) -> EngineStats:
        """See AsyncEngine."""
        return await self._call(self._client.stats)

    async def close(self) -> None:
        """See AsyncEngine."""
        self._closing.set()
        self._post(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run something on the engine's thread between two steps. Raises: what it raises; EngineDead."""
        return await asyncio.wrap_future(self._post(function))

    def _post(self, function: Callable[[], T]) -> Future[T]:
        call = _Call(function, Future())
        with self._gate:
            if not self._ended:
                self._calls.put(call)
                return call.future
        call.refuse(self._dead())
        return call.future

    def _dead(self) -> EngineDead:
        error = EngineDead("the engine has stopped")
        error.__cause__ = self._failure
        return error

    # ------------------------------------------------------------------ on the engine's thread

    def _submit(
        self,
        inbox: Inbox,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None,
    ) -> None:
        inbox.request_id = self._client.submit(prompt_token_ids, params, adapter, cache_salt)
        self._inboxes[inbox.request_id] = inbox

    def _abandon(self, inbox: Inbox) -> None:
        """Nobody reads a request any more. One that was refused, or has ended meanwhile, needs nothing."""
        if inbox.request_id is not None and inbox.request_id in self._inboxes:
            self._client.abort(inbox.request_id)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._do_calls(wait=not self._client.has_work)
                if self._client.has_work:
                    self._deliver(self._client.poll())
        except BaseException as error:
            self._failure = error
        finally:
            self._closing.set()
            try:
                self._client.close()
            finally:
                self._end_all()

    def _end_all(self) -> None:
        """Answer everybody: what was accepted fails, what waits to be done is refused."""
        reason = "the engine has stopped" if self._failure is None else f"the engine has stopped: {self._failure!r}"
        self._deliver([RequestFailed(id_, reason) for id_ in self._inboxes])
        with self._gate:
            self._ended = True
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait().refuse(self._dead())

    def _do_calls(self, *, wait: bool) -> None:
        with suppress(queue.Empty):
            self._calls.get(block=wait).run()
            while not self._closing.is_set():
                self._calls.get_nowait().run()

    def _deliver(self, events: Sequence[Event]) -> None:
        """Hand events over to the event loop, one call for all of them."""
        batches: dict[Inbox, list[Event]] = {}
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is None:
                continue
            batches.setdefault(inbox, []).append(event)
            if not isinstance(event, NOT_TERMINAL):
                del self._inboxes[event.request_id]
        if batches:
            with suppress(RuntimeError):  # the event loop was closed without closing the engine: nobody is left to tell
                self._loop.call_soon_threadsafe(_put_all, batches)


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """Something that is asked of the engine's thread, and where the answer goes."""

    function: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: EngineDead) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Inbox:
    """Events of one request that its reader has not taken yet. Lives on the event loop.

    Attributes:
        request_id: None until the request was accepted.
        ended: the reader has taken the terminal event, or the refusal.
        has_left: there is no reader any more.
    """

    __slots__ = ("_events", "_on_left", "_ready", "_refusal", "ended", "has_left", "request_id")

    def __init__(self, request_id: str | None = None) -> None:
        self._events: list[Event] = []
        self._refusal: Exception | None = None
        self._ready = asyncio.Event()
        self._on_left: OnLeft | None = None
        self.request_id = request_id
        self.ended = False
        self.has_left = False

    def put(self, events: Sequence[Event]) -> None:
        """Events that have come, in order."""
        if self.has_left:
            self._hear(events)
            return
        self._events.extend(events)
        self._ready.set()

    def leave(self, on_left: OnLeft | None) -> None:
        """Nobody takes anything any more: what is here, and what comes, is told to `on_left`."""
        self.has_left, self._on_left = True, on_left
        events, self._events = self._events, []
        self._hear(events)

    def _hear(self, events: Sequence[Event]) -> None:
        if self._on_left is not None:
            for event in events:
                self._on_left(event)

    def refuse(self, error: Exception) -> None:
        """The request was not accepted: `take` raises this."""
        self._refusal = error
        self._ready.set()

    async def take(self) -> list[Event]:
        """All events that have come since the last call; waits for the first. Raises: the refusal."""
        await self._ready.wait()
        self._ready.clear()
        if self._refusal is not None:
            self.ended = True
            raise self._refusal
        events, self._events = self._events, []
        self.ended = not isinstance(events[-1], NOT_TERMINAL)
        return events


def _put_all(batches: dict[Inbox, list[Event]]) -> None:
    for inbox, events in batches.items():
        inbox.put(events)
