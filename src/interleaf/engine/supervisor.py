"""Starts the processes of a server, watches them, and leaves nothing behind. Knows no HTTP and no adapter.

    supervisor ─┬─ engine          dies: the API processes answer that it has, until told to stop; exit code 1
                ├─ publisher       dies: started again, and knows its names from the journal
                └─ API processes   dies: started again; the engine has ended its requests

Every process ends when the supervisor does, however that ends. A first SIGTERM or SIGINT lets the API processes finish
what they have begun, a second one ends everything at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from interleaf.config import EngineConfig
from interleaf.engine.child import Child
from interleaf.engine.messages import Boot
from interleaf.engine.remote import RemoteEngine
from interleaf.engine.serving import AsyncEngine
from interleaf.errors import ConfigError, InterleafError

Progress = Callable[[str, int, int], None]

logger = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_SHM_MIN_BYTES = 2**30
"""Free room below which /dev/shm is no place for slabs: containers often have 64 MB."""

_MAX_RUN_BYTES = 88
BACKLOG = 65535
"""Connections that the kernel keeps until a process takes them; it lowers this to its own limit, net.core.somaxconn."""
_STOP_S = 10.0
"""Given to a process that was asked to end and has nothing left to finish."""

_MAX_RESTARTS, _RESTARTS_WITHIN_S = 5, 60.0


def serve(
    model: str,
    config: EngineConfig,
    *,
    entry: str,
    settings: Mapping[str, Any],
    prepare: Callable[[AsyncEngine], Awaitable[None]],
    listen: Callable[[], Sequence[socket.socket]],
    on_ready: Callable[[], None] = lambda: None,
    api_workers: int = 1,
    slab_dir: str | None = None,
    publisher_threads: int | None = None,
    drain_timeout_s: float = 30.0,
    exit_after_s: float | None = None,
    progress: Progress = lambda what, done, total: None,
) -> int:
    """Run a server until it is told to stop. To be called from the main thread: it handles SIGTERM and SIGINT.

    Args:
        entry: "module:function" of what serves in an API process (`worker.Entry`).
        settings: for it, of plain values.
        prepare: registers the first adapters; nothing listens yet.
        listen: binds the sockets; called when everything else is ready.
        on_ready: called when requests are answered.
        slab_dir: where slabs are written; by default /dev/shm if it has room.
        publisher_threads: adapters that the publisher works on at a time; by default by the machine's cores.
        drain_timeout_s: for API processes to finish what they have begun.
        exit_after_s: from the engine's death to the end; None waits for a signal.

    Returns: the exit code: 0 after a signal and a clean end.

    Raises: whatever kept it from starting; everything has been cleared up then.
    """
    supervisor = Supervisor(model, config, entry, settings, slab_dir, publisher_threads)
    try:
        if supervisor.start(prepare, listen, api_workers, progress):
            on_ready()
        return supervisor.watch(drain_timeout_s, exit_after_s)
    except _Interrupted as error:
        return 128 + error.number
    finally:
        supervisor.clear_up()


class Supervisor:
    """The processes of one server, and the folders that they share."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        entry: str,
        settings: Mapping[str, Any],
        slab_dir: str | None,
        publisher_threads: int | None = None,
    ) -> None:
        self._run = Path(tempfile.mkdtemp(prefix="interleaf-"))  # mode 0700
        self._slabs: Path | None = None
        self._children: list[Child] = []
        self._listeners: list[socket.socket] = []
        self._restarts: list[float] = []
        self._draining = False
        self._at_once = False
        self._may_interrupt = False
        self._exit_code = 0
        self._signals, self._signal_writer = socket.socketpair()
        self._signals.setblocking(False)
        self._signal_writer.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._old_wakeup = -1
        try:
            if len(os.fsencode(self._run)) > _MAX_RUN_BYTES:
                raise ConfigError(
                    f"TMPDIR: the path of a socket may have about 100 bytes, and {self._run} has "
                    f"{len(os.fsencode(self._run))}; {_MAX_RUN_BYTES} at most leave room for its name"
                )
            self._slabs = _slab_folder(slab_dir, self._run)
        except BaseException:
            self.clear_up()
            raise
        self._boot = Boot(
            str(self._run),
            str(self._slabs),
            model=model,
            config=config,
            entry=entry,
            settings=dict(settings),
            publisher_threads=publisher_threads or 0,
        )
        self._take_signals()

    @property
    def run(self) -> Path:
        """The folder of sockets and journal."""
        return self._run

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children)

    def start(
        self,
        prepare: Callable[[AsyncEngine], Awaitable[None]],
        listen: Callable[[], Sequence[socket.socket]],
        api_workers: int,
        progress: Progress,
    ) -> bool:
        """Bring everything up, in the order in which one needs another.

        Returns: False if a signal has come while API processes began to answer, which `watch` sees to.
        Raises: what keeps it from starting.
        """
        engine, publisher = self._spawn("engine", "engine"), self._spawn("publisher", "publisher")
        engine.wait_until_started(progress)
        publisher.wait_until_started()  # it has waited for the engine
        asyncio.run(self._prepare(prepare))
        self._listeners = list(listen())
        for listener in self._listeners:
            listener.listen(BACKLOG)
            listener.setblocking(False)
        try:
            workers = [self._spawn(f"api-{number}", "api") for number in range(1, api_workers + 1)]
            for worker in workers:
                worker.wait_until_started()
            self._may_interrupt = False
        except _Interrupted:  # whoever was answered meanwhile may finish
            return False
        return True

    def watch(self, drain_timeout_s: float, exit_after_s: float | None) -> int:
        """Return the exit code when all is over."""
        deadline: float | None = None
        engine = self._children[0]
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            for child in self._children:
                selector.register(child, selectors.EVENT_READ, child)
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                for key, _ in selector.select(left):
                    if key.data is None:
                        for number in self._signals.recv(4096):
                            if self._draining:
                                logger.warning("a second signal: every process is ended at once")
                                self._at_once = True
                                return 128 + number
                            self._drain()
                            deadline = time.monotonic() + drain_timeout_s
                    else:
                        selector.unregister(key.fileobj)
                        replacement = self._ended(key.data)
                        if replacement is not None:
                            selector.register(replacement, selectors.EVENT_READ, replacement)
                        if key.data is engine and exit_after_s is not None and not self._draining:
                            deadline = time.monotonic() + exit_after_s
                if self._draining and not any(c.name.startswith("api") for c in self._children):
                    return self._exit_code
                if self._exit_code and not self._children:
                    return self._exit_code
                if deadline is not None and time.monotonic() >= deadline:
                    if self._draining:
                        logger.warning("requests were still open after %g s and are ended", drain_timeout_s)
                        return self._exit_code or 1
                    self._drain()
                    deadline = time.monotonic() + drain_timeout_s

    def clear_up(self) -> None:
        """End what still runs, and remove the folders. A signal that comes meanwhile ends everything at once."""
        self._may_interrupt = False
        for listener in self._listeners:
            listener.close()
        if not self._at_once and not self._second_signal():
            for child in reversed(self._children):
                with suppress(ProcessLookupError):
                    child.terminate()
            deadline = time.monotonic() + (_STOP_S if not self._exit_code else 1.0)
            while any(child.is_alive for child in self._children) and time.monotonic() < deadline:
                if self._second_signal():
                    break
                time.sleep(0.01)
        for child in self._children:
            child.kill()
            child.close()
        self._children.clear()
        for folder in (self._slabs, self._run):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._give_signals_back()

    # ------------------------------------------------------------------ processes

    def _spawn(self, name: str, role: str) -> Child:
        inherited = tuple(listener.fileno() for listener in self._listeners) if role == "api" else ()
        child = Child(name, role, msgspec.structs.replace(self._boot, name=name, listeners=inherited), inherited)
        self._children.append(child)
        return child

    def _start(self, name: str, role: str) -> Child:
        child = self._spawn(name, role)
        child.wait_until_started()
        return child

    def _ended(self, child: Child) -> Child | None:
        """A process has ended. Returns: the one that takes its place."""
        code = child.process.wait()
        self._children.remove(child)
        child.close()
        if self._draining:
            if code not in (0, -signal.SIGTERM) and child.name != "publisher":
                self._exit_code = 1
            return None
        logger.error("the %s process has ended with code %d", child.name, code)
        if child.name == "engine":
            self._exit_code = 1
            return None
        if not any(other.name == "engine" and other.is_alive for other in self._children):
            return None  # nothing is started again for an engine that is dead
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < _RESTARTS_WITHIN_S] + [now]
        if len(self._restarts) > _MAX_RESTARTS:
            logger.error("%d processes have died within %g s: giving up", len(self._restarts), _RESTARTS_WITHIN_S)
            self._exit_code = 1
            self._drain()
            return None
        try:
            return self._start(child.name, child.name.partition("-")[0])
        except InterleafError as error:
            logger.error("the %s process cannot be started again: %s", child.name, error)
            self._exit_code = 1
            self._drain()
            return None

    def _drain(self) -> None:
        """Let the API processes finish; nothing is started again."""
        self._draining = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for child in self._children:
            if child.name.startswith("api"):
                child.terminate()

    async def _prepare(self, prepare: Callable[[AsyncEngine], Awaitable[None]]) -> None:
        engine = await RemoteEngine.connect(self._run)
        try:
            await prepare(engine)
        finally:
            await engine.close()

    # ------------------------------------------------------------------ signals

    def _take_signals(self) -> None:
        """While processes start a signal interrupts; once they run it is a byte that `watch` reads."""
        self._may_interrupt = True
        self._old_wakeup = signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._may_interrupt:
            self._may_interrupt = False
            raise _Interrupted(number)

    def _second_signal(self) -> bool:
        with suppress(BlockingIOError):
            return bool(self._signals.recv(4096))
        return False

    def _give_signals_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._old_wakeup)
        self._handlers.clear()
        self._signals.close()
        self._signal_writer.close()


class _Interrupted(Exception):
    """A signal came before the server was ready."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def _slab_folder(wanted: str | None, run: Path) -> Path:
    """A new folder for slabs that only this user may enter. Raises: ConfigError: it cannot be made."""
    parent = Path(wanted) if wanted is not None else _SHM
    if wanted is None:
        try:
            room = os.statvfs(parent)
            has_room = room.f_bavail * room.f_frsize >= _SHM_MIN_BYTES and os.access(parent, os.W_OK)
        except OSError:
            has_room = False
        if not has_room:
            parent = run
    try:
        return Path(tempfile.mkdtemp(prefix="interleaf-", dir=parent))
    except OSError as error:
        raise ConfigError(f"slab_dir={parent} cannot hold slabs: {error.strerror}") from None
