"""The publisher: reads, checks and lays out adapters, and keeps their names. Never in the way of a step.

    Load ─▶ read, check, digest ─▶ lay out, write slab ─▶ Register ─▶ (engine maps it) Done ─▶ name visible ─▶ Loaded
            ╰────── on one of a few threads ───────╯

Several adapters are worked on at a time; messages and names belong to one thread, which waits for none of them.
The engine holds at least the adapters that have names: it gets one before its name is given and loses it after its last
name was taken. So a publisher that was killed leaves at most adapters without names, which its successor withdraws.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec
import torch

from interleaf.adapters.image import draft
from interleaf.adapters.parsed import ParsedAdapter
from interleaf.adapters.registry import Registry
from interleaf.adapters.slabs import SUFFIX, write_slab
from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid
from interleaf.engine import messages as m
from interleaf.engine.bell import Bell
from interleaf.engine.channel import ENGINE_SOCKET, PUBLISHER_SOCKET, Endpoint, Link, Peer
from interleaf.engine.child import Parent
from interleaf.engine.journal import NameTable
from interleaf.errors import AdapterLoadFailed, InterleafError
from interleaf.parallel.shard import Shard

JOURNAL = "names"
"""File in the run's folder."""

T = TypeVar("T")

_IDLE_WAIT_S = 0.5
_CORES_A_THREAD = 4
"""Of the machine, for each adapter that is worked on at a time, if nothing else is said."""
_MAX_THREADS = 8
_NICE = 10
"""A tenth of the weight that the scheduler gives to others."""

_REQUESTS = msgspec.msgpack.Decoder(m.ToPublisher)
_REPLIES = msgspec.msgpack.Decoder(m.EngineToPublisher)


@dataclass(frozen=True, slots=True)
class _Registration:
    """A slab that the engine was told of, and what to do when it has answered."""

    uid: AdapterUid
    then: Callable[[m.WireError | None], None]


class Publisher:
    """Adapters from sources to slabs, and their names. Owned by one thread.

    Args:
        run: folder of the sockets and the journal.
        slabs: folder for slabs; what lies there was left by a publisher before.
        num_threads: adapters that are read and laid out at a time to be registered, and as many to be brought back.

    Raises: ConnectionError: there is no engine.
    """

    def __init__(self, run: Path, slabs: Path, num_threads: int = 1) -> None:
        self._slabs = slabs
        for left in slabs.glob(f"*{SUFFIX}"):
            left.unlink(missing_ok=True)
        self._table = NameTable(run / JOURNAL)
        self._calls: dict[int, _Registration] = {}  # that the engine has not answered
        self._last_call = 0
        self._stopping = False
        self._engine = Link(str(run / ENGINE_SOCKET))
        self._unread: list[bytes] = []  # what the engine has said behind its welcome
        self._engine.send(m.encode(m.Hello("publisher")))
        self._welcome = self._read_welcome()
        self._shard = Shard(self._welcome.spec)
        self._dtype = getattr(torch, self._welcome.dtype)
        for uid in self._welcome.uids:
            if uid not in self._table.sources:
                self._engine.send(m.encode(m.Withdraw(uid)))
        self._endpoint = Endpoint(str(run / PUBLISHER_SOCKET))
        # One torch thread each, and of the scheduling class of the thread that starts them: this one.
        self._threads = ThreadPoolExecutor(num_threads, "publish", torch.set_num_threads, (1,))
        # Requests wait for what the engine asks for: not behind hundreds of adapters that somebody registers.
        self._fetchers = ThreadPoolExecutor(num_threads, "fetch", torch.set_num_threads, (1,))
        self._finished: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what to do about work that has been done
        self._bell = Bell()

    def stop(self) -> None:
        """Leave `run` soon. May be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`. Raises: ConnectionError: the engine has died."""
        for data in self._unread:  # among it what the publisher before was asked for
            self._from_engine(data)
        while not self._stopping:
            self._endpoint.wait(_IDLE_WAIT_S, self._engine, self._bell)
            self._go_on()
            for data in self._engine.receive():
                self._from_engine(data)
            for peer, data in self._endpoint.receive():
                self._from_api(peer, data)
            self._endpoint.departed()
            self._endpoint.flush()

    def close(self) -> None:
        """Wait for what is being worked on, and end all connections."""
        for threads in (self._threads, self._fetchers):
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in (self._threads, self._fetchers):
            threads.shutdown()
        self._bell.close()
        self._endpoint.close()
        self._engine.close()
        self._table.close()

    def _read_welcome(self) -> m.WelcomePublisher:
        while True:
            self._engine.wait(_IDLE_WAIT_S)
            self._unread += self._engine.receive()
            if self._unread:
                message = _REPLIES.decode(self._unread.pop(0))
                assert isinstance(message, m.WelcomePublisher), message  # the engine's first word
                return message

    def _from_engine(self, data: bytes) -> None:
        match _REPLIES.decode(data):
            case m.Done(call):
                self._registered(call, None)
            case m.Failed(call, error):
                self._registered(call, error)
            case m.Fetch(uid, source):
                self._fetch(uid, source)
            case m.Stopping(reason):
                raise ConnectionError(reason)

    def _from_api(self, peer: Peer, data: bytes) -> None:
        match _REQUESTS.decode(data):
            case m.Load() as load:
                self._send(peer, m.Taken(load.call))
                with self._failing(peer, load.call):
                    self._load(peer, load)
            case m.Unload() as unload:
                with self._failing(peer, unload.call):
                    self._unload(unload.name)
                    self._send(peer, m.Done(unload.call))
            case m.AskNames(call):
                self._send(peer, m.Names(call, self._table.version, self._table.uids))

    def _load(self, peer: Peer, load: m.Load) -> None:
        Registry.check_name(load.name)

        def written(uid: AdapterUid, slab: Path) -> None:
            self._last_call += 1
            self._calls[self._last_call] = _Registration(uid, lambda error: registered(uid, error))
            self._engine.send(m.encode(m.Register(self._last_call, uid, str(slab))))

        def registered(uid: AdapterUid, error: m.WireError | None) -> None:
            with self._failing(peer, load.call):
                if error is not None:  # the engine knows no name
                    raise m.WireError(error.kind, error.message.replace(uid, load.name), error.attributes).exception()
                self._table.check_free(load.name, uid)  # another may have taken it meanwhile
                if self._table.uids.get(load.name) != uid:
                    self._table.publish(load.name, uid, load.source)
                    self._tell(m.Renamed(self._table.version, load.name, uid))
                self._send(peer, m.Loaded(load.call, uid))

        def parsed(adapter: ParsedAdapter) -> None:
            self._table.check_free(load.name, adapter.uid)
            if adapter.uid in self._table.sources:  # under this name or another: the engine has it
                registered(adapter.uid, None)
            else:
                self._work(
                    lambda: self._write(adapter, load.source),
                    lambda slab: written(adapter.uid, slab),
                    lambda: self._failing(peer, load.call),
                )

        self._work(
            lambda: open_adapter(load.source, self._welcome.spec), parsed, lambda: self._failing(peer, load.call)
        )

    def _registered(self, call: int, error: m.WireError | None) -> None:
        registration = self._calls.pop(call)
        registration.then(error)
        self._withdraw_if_unnamed(registration.uid)

    def _unload(self, name: str) -> None:
        uid = self._table.withdraw(name)
        self._tell(m.Renamed(self._table.version, name, None))
        self._withdraw_if_unnamed(uid)

    def _withdraw_if_unnamed(self, uid: AdapterUid) -> None:
        """Unless a name for it is on its way."""
        if uid not in self._table.sources and all(uid != coming.uid for coming in self._calls.values()):
            self._engine.send(m.encode(m.Withdraw(uid)))

    def _fetch(self, uid: AdapterUid, source: str) -> None:
        """Make a slab again. Its source must still hold the adapter that was registered."""
        source = self._table.sources.get(uid, source)  # where it was seen last

        def answer(slab: str | None, failure: str | None) -> None:
            self._engine.send(m.encode(m.Fetched(uid, slab, failure)))

        @contextmanager
        def failing() -> Iterator[None]:
            try:
                yield
            except AdapterLoadFailed as error:
                answer(None, error.reason)
            except InterleafError as error:
                answer(None, str(error))
            except Exception as error:  # requests wait for an answer, whatever has happened
                answer(None, f"{source} could not be read: {type(error).__name__}: {error}")

        def write() -> Path:
            parsed = open_adapter(source, self._welcome.spec)
            if parsed.uid != uid:
                raise AdapterLoadFailed(
                    uid, f"{source} has changed since it was registered: it now holds adapter {parsed.uid[:12]}"
                )
            return self._write(parsed, source)

        self._work(write, lambda slab: answer(str(slab), None), failing, self._fetchers)

    def _work(
        self,
        function: Callable[[], T],
        then: Callable[[T], None],
        failing: Callable[[], AbstractContextManager[None]],
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        """Call something on another thread, and go on with the result on this one.

        Args:
            failing: a context that answers for what `function` or `then` raises.
            threads: of which one; None: of those that register.
        """

        def finish(done: Future[T]) -> None:
            with failing():
                then(done.result())

        def ended(done: Future[T]) -> None:
            if not done.cancelled():
                self._finished.put(lambda: finish(done))
                self._bell.ring()

        (threads or self._threads).submit(function).add_done_callback(ended)

    def _go_on(self) -> None:
        """Take up what other threads have finished."""
        self._bell.hush()
        with suppress(Empty):
            while True:
                self._finished.get_nowait()()

    def _write(self, parsed: ParsedAdapter, source: str) -> Path:
        """Lay an adapter out as the engine's pages hold it. Raises: AdapterRejected, AdapterLoadFailed."""
        image = draft(parsed, self._shard, self._welcome.geometry, self._dtype, self._welcome.order)
        return write_slab(self._slabs, parsed.uid, source, image)

    @contextmanager
    def _failing(self, peer: Peer, call: int) -> Iterator[None]:
        """Answer with what the block raises: one adapter's trouble is not the publisher's."""
        try:
            yield
        except Exception as error:
            self._send(peer, m.Failed(call, m.WireError.of(error)))

    def _tell(self, message: m.Message) -> None:
        for peer in self._endpoint.peers():
            self._send(peer, message)

    def _send(self, peer: Peer, message: m.Message) -> None:
        self._endpoint.send(peer, m.encode(message))


def clear_up(boot: m.Boot) -> None:
    """Remove what this run has in the file system."""
    for folder in (boot.slabs, boot.run):
        shutil.rmtree(folder, ignore_errors=True)


def _step_back() -> None:
    """Take a tenth of a core that others want, so that a thread of a step that wakes has it almost at once.

    Not less (SCHED_IDLE): where a step keeps every core busy an adapter would take minutes. Where Linux shares cores
    out by session first, the session steps back too: this process has one of its own.
    """
    with suppress(OSError):
        os.nice(_NICE)
    with suppress(OSError, AttributeError):  # the file and the class are Linux's
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        Path("/proc/self/autogroup").write_text(str(_NICE))


def default_threads() -> int:
    """Adapters to work on at a time on this machine: a step needs its cores more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, max(1, cores // _CORES_A_THREAD))


def run_publisher(parent: Parent) -> int:
    """The publisher process. Returns: its exit code."""
    torch.set_num_threads(1)
    _step_back()
    publisher = None
    try:
        boot = parent.boot
        publisher = Publisher(Path(boot.run), Path(boot.slabs), boot.publisher_threads or default_threads())
        signal.signal(signal.SIGTERM, lambda number, frame: publisher.stop())
        parent.started()
        publisher.run()
    except ConnectionError:  # the engine has died: the supervisor knows
        return 1
    finally:
        if publisher is not None:
            publisher.close()
    return 0
