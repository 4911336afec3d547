"""Bytes between processes: a bound endpoint, links to it, and the certainty that the other end lives. No messages.

ZeroMQ carries messages over a socket file. It does not say when a process behind a connection has died, so every link
also holds a *lifeline*: a plain stream connection on which nothing is said after the sender's identity. The kernel ends
it with the process, however that died, and both sides see it at once.

Nothing here blocks: what a slow peer does not take is kept for it up to a limit, beyond which it counts as dead.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from interleaf.engine.bell import Pollable

Peer = bytes
"""The identity of a link."""

ENGINE_SOCKET = "engine"
PUBLISHER_SOCKET = "publisher"
"""Files in a run's folder, by who listens there."""

MAX_BACKLOG_BYTES = 64 * 2**20
"""Kept for a peer that does not read, beside what ZeroMQ and the kernel hold."""

_IDENTITY_BYTES = 32
_LINGER_MS = 2000
_CONNECT_S = 120.0
"""For the other process to start: it may have been started at the same time, on a machine that is busy."""

_REFUSED_S = 1.0
_RETRY_S = 0.02


class Endpoint:
    """Where links arrive. Owned by one thread.

    Args:
        path: of the socket files, which lie in a folder that only their owner may enter.
    """

    def __init__(self, path: str) -> None:
        for file in (path, _life(path)):  # of an endpoint that was killed
            with suppress(FileNotFoundError):
                os.unlink(file)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error, rather than silence, when a peer is full or gone
        self._router.setsockopt(zmq.LINGER, _LINGER_MS)
        self._router.bind(f"ipc://{path}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(_life(path))
        self._listener.listen(128)
        self._unnamed: list[socket.socket] = []
        self._lifelines: dict[Peer, socket.socket] = {}
        self._backlogs: dict[Peer, _Backlog] = {}

    def peers(self) -> tuple[Peer, ...]:
        """Links that are alive, in the order they came."""
        return tuple(self._lifelines)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlogs)

    def wait(self, timeout_s: float, *others: Pollable) -> None:
        """Return when something has come, here or at one of the others, or after the time."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for connection in (self._listener, *self._unnamed, *self._lifelines.values()):
            poller.register(connection, zmq.POLLIN)
        for other in others:
            other.register(poller)
        poller.poll(int(timeout_s * 1000))

    def receive(self) -> list[tuple[Peer, bytes]]:
        """All that has come, in order. Peers that have no lifeline are not listened to."""
        self._accept()
        messages = []
        with suppress(zmq.Again):
            while True:
                peer, data = self._router.recv_multipart(zmq.NOBLOCK)
                if peer not in self._lifelines:
                    self._accept()  # a link opens its lifeline before it speaks
                if peer in self._lifelines:
                    messages.append((peer, data))
        return messages

    def departed(self) -> list[Peer]:
        """Links whose process has died, or has been given up, since the last call."""
        gone = [peer for peer, backlog in self._backlogs.items() if backlog.num_bytes > MAX_BACKLOG_BYTES]
        for peer, lifeline in self._lifelines.items():
            if peer not in gone and not _is_open(lifeline):
                gone.append(peer)
        for peer in gone:
            self._backlogs.pop(peer, None)
            self._lifelines.pop(peer).close()
        return gone

    def send(self, peer: Peer, data: bytes) -> None:
        """Send, or keep for later. A peer that has gone is left to `departed`."""
        if peer in self._backlogs or not self._try(peer, data):
            self._backlogs.setdefault(peer, _Backlog()).append(data)

    def flush(self) -> None:
        """Try again to send what was kept."""
        for peer, backlog in list(self._backlogs.items()):
            while backlog.messages and self._try(peer, backlog.messages[0]):
                backlog.popleft()
            if not backlog.messages:
                del self._backlogs[peer]

    def close(self) -> None:
        """Send what is on its way, within two seconds, then end every link."""
        self._router.close()
        self._context.term()
        for connection in (self._listener, *self._unnamed, *self._lifelines.values()):
            connection.close()

    def _try(self, peer: Peer, data: bytes) -> bool:
        """Returns: False, the peer is full. What is sent to nobody is sent."""
        if peer not in self._lifelines:
            return True
        try:
            self._router.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._unnamed.append(connection)
        for connection in list(self._unnamed):
            try:
                name = connection.recv(_IDENTITY_BYTES)  # so few bytes come in one piece
            except BlockingIOError:
                continue
            except OSError:
                name = b""
            self._unnamed.remove(connection)
            if len(name) == _IDENTITY_BYTES:
                self._lifelines[name] = connection
            else:
                connection.close()


class _Backlog:
    """What one peer has not taken yet."""

    __slots__ = ("messages", "num_bytes")

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.num_bytes = 0

    def append(self, data: bytes) -> None:
        self.messages.append(data)
        self.num_bytes += len(data)

    def popleft(self) -> None:
        self.num_bytes -= len(self.messages.popleft())


class Link:
    """A connection to an endpoint, for a process without an event loop. Owned by one thread.

    It waits for an endpoint that is not there yet, not for one that takes the place of another.

    Raises: ConnectionError: nobody answers.
    """

    def __init__(self, path: str) -> None:
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                identity, self._lifeline = _open_lifeline(path)
                break
            except ConnectionError:
                if os.path.exists(_life(path)):  # whoever made it has died, or is about to listen
                    deadline = min(deadline, time.monotonic() + _REFUSED_S)
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        _set_up(self._dealer, identity, path)

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller notice what comes, and the end."""
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)

    def send(self, data: bytes) -> None:
        """Queue a message."""
        self._dealer.send(data)

    def receive(self) -> list[bytes]:
        """All that has come, in order. Raises: ConnectionError: the other process has died."""
        messages = []
        with suppress(zmq.Again):
            while True:
                messages.append(self._dealer.recv(zmq.NOBLOCK))
        if not messages and not _is_open(self._lifeline):
            raise ConnectionError("the process at the other end has died")
        return messages

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or after the time."""
        poller = zmq.Poller()
        self.register(poller)
        poller.poll(int(timeout_s * 1000))

    def close(self) -> None:
        """Send what is on its way, then end the connection."""
        self._dealer.close()
        self._context.term()
        self._lifeline.close()


class AsyncLink:
    """A connection to an endpoint, for an event loop."""

    def __init__(self, identity: Peer, lifeline: socket.socket, path: str) -> None:
        self._lifeline = lifeline
        self._context = zmq.asyncio.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.SNDHWM, 0)  # `send` queues without limit: what is queued is what users asked for
        _set_up(self._dealer, identity, path)

    @classmethod
    async def open(cls, path: str) -> AsyncLink:
        """Raises: ConnectionError: nobody has answered within minutes."""
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                return cls(*_open_lifeline(path), path)
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    def send(self, data: bytes) -> None:
        """Queue a message; does not wait."""
        asyncio.ensure_future(self._dealer.send(data)).add_done_callback(_forget)

    async def receive(self) -> bytes:
        """The next message."""
        data: bytes = await self._dealer.recv()
        return data

    @property
    def is_open(self) -> bool:
        """Whether the other process lives, at this moment: `died` tells an event loop later."""
        return _is_open(self._lifeline)

    async def died(self) -> None:
        """Return when the other process has died."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._lifeline, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._lifeline)

    def close(self) -> None:
        """End the connection."""
        self._dealer.close(linger=0)
        self._context.term()
        self._lifeline.close()


def _life(path: str) -> str:
    return f"{path}.life"


def _open_lifeline(path: str) -> tuple[Peer, socket.socket]:
    """Raises: ConnectionError: nobody is there, yet or any more."""
    identity = uuid.uuid4().hex.encode()
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lifeline.connect(_life(path))  # at once, or not at all: the kernel answers for the listener
        lifeline.sendall(identity)
    except OSError as error:
        lifeline.close()
        raise ConnectionError(f"{path}: nobody answers: {error}") from error
    lifeline.setblocking(False)
    return identity, lifeline


def _set_up(dealer: zmq.Socket[bytes] | zmq.asyncio.Socket, identity: Peer, path: str) -> None:
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, _LINGER_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)  # a new process at the same path is a new link
    dealer.connect(f"ipc://{path}")


def _is_open(lifeline: socket.socket) -> bool:
    """Whether the process at the other end lives: then its lifeline is silent."""
    try:
        return lifeline.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _forget(sent: asyncio.Future[Any]) -> None:
    """A message that could not be sent: its sender learns of it when the lifeline ends."""
    if not sent.cancelled():
        sent.exception()
