"""Wakes a thread that waits for messages. Knows none of them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Protocol

import zmq


class Pollable(Protocol):
    """Something that a wait may end for."""

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller notice it."""


class Bell:
    """Rung by any thread, heard by the one that waits. A ring before the wait is heard too."""

    def __init__(self) -> None:
        self._ear, self._hammer = socket.socketpair()
        self._ear.setblocking(False)
        self._hammer.setblocking(False)

    def register(self, poller: zmq.Poller) -> None:
        """Have a poller notice a ring."""
        poller.register(self._ear, zmq.POLLIN)

    def ring(self) -> None:
        """Wake whoever waits. After `close` nobody does."""
        with suppress(OSError):  # full: it has been rung often enough
            self._hammer.send(b"!")

    def hush(self) -> None:
        """Take in all rings so far. To be called before what they told of is looked at."""
        with suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass

    def close(self) -> None:
        """Release the sockets."""
        self._ear.close()
        self._hammer.close()
