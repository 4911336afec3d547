"""The publisher: reads, checks and lays out adapters, and keeps their names. Never in the way of a step.

    Load ─▶ read, check, digest ─▶ lay out, write slab ─▶ Register ─▶ (engine maps it) Done ─▶ name visible ─▶ Loaded

The engine holds at least the adapters that have names: it gets one before its name is given and loses it after its last
name was taken. So a publisher that was killed leaves at most adapters without names, which its successor withdraws.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from interleaf.adapters.image import build
from interleaf.adapters.parsed import ParsedAdapter
from interleaf.adapters.registry import Registry
from interleaf.adapters.slabs import SUFFIX, write_slab
from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid
from interleaf.engine import messages as m
from interleaf.engine.channel import ENGINE_SOCKET, PUBLISHER_SOCKET, Endpoint, Link, Peer
from interleaf.engine.child import Parent
from interleaf.engine.journal import NameTable
from interleaf.errors import AdapterLoadFailed, InterleafError
from interleaf.parallel.shard import Shard

JOURNAL = "names"
"""File in the run's folder."""

_IDLE_WAIT_S = 0.5
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

    Raises: ConnectionError: there is no engine.
    """

    def __init__(self, run: Path, slabs: Path) -> None:
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

    def stop(self) -> None:
        """Leave `run` soon. May be called from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`. Raises: ConnectionError: the engine has died."""
        for data in self._unread:  # among it what the publisher before was asked for
            self._from_engine(data)
        while not self._stopping:
            self._endpoint.wait(_IDLE_WAIT_S, self._engine)
            for data in self._engine.receive():
                self._from_engine(data)
            for peer, data in self._endpoint.receive():
                self._from_api(peer, data)
            self._endpoint.departed()
            self._endpoint.flush()

    def close(self) -> None:
        """End all connections."""
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
        parsed = open_adapter(load.source, self._welcome.spec)
        uid = parsed.uid
        self._table.check_free(load.name, uid)

        def registered(error: m.WireError | None) -> None:
            with self._failing(peer, load.call):
                if error is not None:
                    raise error.exception()
                self._table.check_free(load.name, uid)  # another may have taken it meanwhile
                if self._table.uids.get(load.name) != uid:
                    self._table.publish(load.name, uid, load.source)
                    self._tell(m.Renamed(self._table.version, load.name, uid))
                self._send(peer, m.Loaded(load.call, uid))

        if uid in self._table.sources:  # under this name or another: the engine has it
            registered(None)
            return
        slab = self._write(parsed, load.source)
        self._last_call += 1
        self._calls[self._last_call] = _Registration(uid, registered)
        self._engine.send(m.encode(m.Register(self._last_call, uid, str(slab))))

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
        slab, failure = None, None
        source = self._table.sources.get(uid, source)  # where it was seen last
        try:
            parsed = open_adapter(source, self._welcome.spec)
            if parsed.uid != uid:
                raise AdapterLoadFailed(
                    uid, f"{source} has changed since it was registered: it now holds adapter {parsed.uid[:12]}"
                )
            slab = str(self._write(parsed, source))
        except AdapterLoadFailed as error:
            failure = error.reason
        except InterleafError as error:
            failure = str(error)
        except Exception as error:  # requests wait for an answer, whatever has happened
            failure = f"{source} could not be read: {type(error).__name__}: {error}"
        self._engine.send(m.encode(m.Fetched(uid, slab, failure)))

    def _write(self, parsed: ParsedAdapter, source: str) -> Path:
        """Lay an adapter out as the engine's pages hold it. Raises: AdapterRejected, AdapterLoadFailed."""
        image = build(parsed, self._shard, self._welcome.geometry, self._dtype, self._welcome.order)
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
    """Take only the time that nobody else wants: a thread of a step that wakes has its core at once."""
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def run_publisher(parent: Parent) -> int:
    """The publisher process. Returns: its exit code."""
    torch.set_num_threads(1)
    _step_back()
    publisher = None
    try:
        publisher = Publisher(Path(parent.boot.run), Path(parent.boot.slabs))
        signal.signal(signal.SIGTERM, lambda number, frame: publisher.stop())
        parent.started()
        publisher.run()
    except ConnectionError:  # the engine has died: the supervisor knows
        return 1
    finally:
        if publisher is not None:
            publisher.close()
    return 0
