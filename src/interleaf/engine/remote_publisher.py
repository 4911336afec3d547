"""`RemotePublisher`: the publisher of another process, and a copy of its table of names. Knows no request.

A publisher that dies is started again by whoever started it; this finds its successor, and answers for what was asked
of the dead one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from interleaf.core import AdapterUid
from interleaf.engine import messages as m
from interleaf.engine.calls import Calls
from interleaf.engine.channel import PUBLISHER_SOCKET, AsyncLink
from interleaf.errors import AdaptersUnavailable, EngineDead, InterleafError

_RESTART_S = 30.0
"""For a publisher that has died to be started again, which is mostly a few seconds; then a call is refused."""

_DIED = "the process that reads adapters has died while it was at this, and is started again; try once more"

_FROM_PUBLISHER = msgspec.msgpack.Decoder(m.FromPublisher)


class RemotePublisher:
    """Its methods are called from one event loop.

    Args:
        run: the folder of its socket.
        start: runs a coroutine as a task that is cancelled when the owner closes, before `close` is called.

    Attributes:
        names: the uid of every name, brought up to date by every change that the publisher tells.
    """

    def __init__(self, run: Path, start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._path = str(run / PUBLISHER_SOCKET)
        self._start = start
        self.names: dict[str, AdapterUid] = {}
        self._version = 0
        self._calls = Calls()
        self._taken: set[int] = set()  # of them, those that the publisher has
        self._link: AsyncLink | None = None
        self._changed = asyncio.Event()  # another one is there, or there will be none
        self._stopped: str | None = None  # why nothing is to be asked any more

    async def open(self) -> None:
        """Reach it and read its names. Raises: ConnectionError: nobody answers."""
        self._link = await AsyncLink.open(self._path)
        self._start(self._keep(self._link))
        await self.read_names()

    async def load(self, name: str, source: str) -> AdapterUid:
        """Have it read an adapter and give it a name. Raises: as `ask`."""
        loaded = await self.ask(lambda call: m.Load(call, name, source))
        assert isinstance(loaded, m.Loaded)
        return loaded.uid

    async def unload(self, name: str) -> None:
        """Have it take a name away. Raises: as `ask`."""
        await self.ask(lambda call: m.Unload(call, name))

    async def read_names(self) -> None:
        """Have the table as it is now. Raises: as `ask`."""
        await self.ask(m.AskNames)

    def stop(self, reason: str) -> None:
        """Nothing is to be asked any more, and nothing will be answered."""
        self._stopped = reason
        self._calls.fail(EngineDead(reason))
        self._changed.set()

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def ask(self, message: Callable[[int], m.Message]) -> m.Message:
        """Ask the publisher. What it was at when it died may have killed it: that is not asked of its successor.

        A process that is about to die still looks alive. What it has not taken up is asked of the next one, once: it
        may have died before it could say so.

        Raises: what the publisher answers; EngineDead; AdaptersUnavailable: it has died, or is not back in time.
        """
        for _ in range(2):
            publisher = await self._living()
            call, future = self._calls.new()
            publisher.send(m.encode(message(call)))
            try:
                answer: m.Message = await future
                return answer
            except _Untaken:
                continue
            finally:
                self._taken.discard(call)
        raise AdaptersUnavailable(_DIED)

    async def _living(self) -> AsyncLink:
        """The publisher; if it has died, the one that takes its place."""
        try:
            async with asyncio.timeout(_RESTART_S):
                while True:
                    self._require_alive()
                    if self._link is not None and self._link.is_open:
                        return self._link
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            died = f"the process that reads adapters has died and is not back after {_RESTART_S:g} s; try once more"
            raise AdaptersUnavailable(died) from None

    async def _keep(self, link: AsyncLink) -> None:
        """Hear the publisher; when it has died, reach its successor."""
        hearing = self._start(self._hear(link))
        while True:
            await link.died()
            self._link = None
            await self._hang_up(link, hearing)
            for call in self._calls.open:
                self._calls.answer(call, AdaptersUnavailable(_DIED) if call in self._taken else _Untaken())
            successor = await self._successor()
            if successor is None:
                return
            link, hearing = successor
            self._link = link
            self._changed.set()

    async def _successor(self) -> tuple[AsyncLink, asyncio.Task[None]] | None:
        """The publisher in the place of one that has died, and the task that hears it; None: there will be no other.

        A process that is being killed takes connections for a while. The one that lives answers.
        """
        while self._stopped is None:
            try:
                link = await AsyncLink.open(self._path)
            except ConnectionError:
                continue
            hearing, death = self._start(self._hear(link)), self._start(link.died())
            call, names = self._calls.new()
            link.send(m.encode(m.AskNames(call)))
            answers = False
            try:
                await asyncio.wait([names, death], return_when=asyncio.FIRST_COMPLETED)
                answers = names.done() and names.exception() is None
            finally:
                death.cancel()
                names.cancel()
                if not answers:
                    await self._hang_up(link, hearing)
            if answers:
                return link, hearing
        return None

    async def _hang_up(self, link: AsyncLink, hearing: asyncio.Task[None]) -> None:
        """Hear nothing more of a link, and close it."""
        hearing.cancel()
        try:
            await asyncio.wait([hearing])
        finally:  # whoever waits here may be cancelled, too
            link.close()

    async def _hear(self, link: AsyncLink) -> None:
        while True:
            message = _FROM_PUBLISHER.decode(await link.receive())
            match message:
                case m.Renamed():
                    self._renamed(message)
                case m.Taken(call):
                    self._taken |= {call} & {*self._calls.open}
                case m.Failed(call, error):
                    self._calls.answer(call, error.exception())
                case m.Names():
                    self.names, self._version = message.uids, message.version
                    self._calls.answer(message.call, message)
                case m.Loaded() | m.Done():
                    self._calls.answer(message.call, message)

    def _renamed(self, change: m.Renamed) -> None:
        if change.version <= self._version:
            return  # in the table that was read since
        if change.version > self._version + 1:
            self._start(self._reread_names())
        self._version = change.version
        if change.uid is None:
            self.names.pop(change.name, None)
        else:
            self.names[change.name] = change.uid

    async def _reread_names(self) -> None:
        with suppress(InterleafError):  # its successor is asked again
            await self.read_names()

    def _require_alive(self) -> None:
        if self._stopped is not None:
            raise EngineDead(self._stopped)


class _Untaken(InterleafError):
    """The publisher has died, and had not taken up the call as far as is known."""
