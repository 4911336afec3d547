"""An API process: finds the function that serves, and gives it the engine and the listening sockets. Knows no HTTP."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from interleaf.engine.child import Parent
from interleaf.engine.messages import Boot
from interleaf.engine.remote import RemoteEngine
from interleaf.engine.serving import AsyncEngine

Connect = Callable[[], Awaitable[AsyncEngine]]
"""Reaches the engine; to be awaited on the event loop that will use it."""

Entry = Callable[[dict[str, Any], Connect, Sequence[socket.socket], Callable[[], None], Path], None]
"""Serves until SIGTERM, which it handles by finishing what it has begun.

Args: its settings; the way to the engine; bound, listening sockets; what to call once requests are answered; a file
    for what it has counted, which need not exist: its successor gets the same, other API processes get neighbours.
"""


def find_entry(path: str) -> Entry:
    """The function that "module:function" names."""
    module, _, function = path.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def counts_file(boot: Boot) -> Path:
    """Where an API process keeps its counts."""
    return Path(boot.run) / f"{boot.name}.counts"


def run_worker(parent: Parent) -> int:
    """An API process. Returns: its exit code."""
    boot = parent.boot
    sockets = [socket.socket(fileno=descriptor) for descriptor in boot.listeners]
    is_started = False

    def started() -> None:
        nonlocal is_started
        is_started = True
        parent.started()

    async def connect() -> AsyncEngine:
        return await RemoteEngine.connect(boot.run)

    try:
        find_entry(boot.entry)(boot.settings, connect, sockets, started, counts_file(boot))
    except Exception as error:
        if is_started:
            raise
        parent.failed(error)
        return 1
    return 0
