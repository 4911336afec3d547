"""The engine in a process of its own: messages in, one step, events out. Parses no adapter, knows no name.

    while it runs:   receive ─▶ submit, abort, register   ─▶ one step ─▶ one message of events per API process

Everything but the step itself is a few microseconds per message. Adapters go by their uid here: the registry, the host
tier and the pool know nothing else. What an API process has asked for ends with that process.
"""

from __future__ import annotations

import signal
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from interleaf.adapters.pinned import PinnedMemory
from interleaf.adapters.slabs import SlabStore
from interleaf.config import EngineConfig
from interleaf.core import (
    NOT_TERMINAL,
    AdapterUid,
    Event,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestWaiting,
    TokenEvent,
)
from interleaf.engine import messages as m
from interleaf.engine.bell import Bell
from interleaf.engine.build import EngineParts, build_engine, disk_tier, image_thread, stream_order
from interleaf.engine.channel import ENGINE_SOCKET, Endpoint, Peer
from interleaf.engine.child import Parent
from interleaf.engine.client import InProcessClient
from interleaf.engine.serving import EngineInfo
from interleaf.errors import AdapterNotFound, InterleafError
from interleaf.memory.geometry import PageGeometry

_IDLE_WAIT_S = 0.5
"""Longest sleep of an idle engine; what comes ends it at once, a signal within this time."""

_SHORTEST_WAIT_S = 0.001
"""Waits are whole milliseconds."""

_STALL_WAIT_S = 0.05
"""Longest sleep when all open requests wait for slabs."""

_BACKLOG_WAIT_S = 0.01
"""Longest sleep when somebody has not taken what was sent."""

_LONG_WAIT_S = 5.0
"""A request that has had no seat for so long is told of, with the reason: it becomes a line of the log."""

_REQUESTS = msgspec.msgpack.Decoder(m.ToEngine)


class EngineServer:
    """The step loop and those it works for. Owned by one thread.

    Args:
        endpoint: closed with the server.
    """

    def __init__(self, model: str, boot: m.Boot, endpoint: Endpoint, parent: Parent | None = None) -> None:
        self._endpoint = endpoint
        self._publisher: Peer | None = None
        self._owners: dict[str, Peer] = {}  # of the open requests
        self._wanted: deque[m.Fetch] = deque()  # slabs to ask for
        self._stopping = False
        self._bell = Bell()  # rung by the threads that bring images
        self._parts = build_engine(
            model, boot.config, None if parent is None else parent.progress, partial(self._make_store, boot.config)
        )
        self._client = InProcessClient(self._parts, tell_waits_after_s=_LONG_WAIT_S)
        self._info = EngineInfo.of(self._parts)

    @property
    def parts(self) -> EngineParts:
        """The engine's rooms, for tests."""
        return self._parts

    def stop(self) -> None:
        """Leave `run` before the next step. May be called from a signal handler."""
        self._stopping = True

    def run(self) -> str | None:
        """Serve until `stop`, or until a step fails. Returns: why it failed."""
        reason = None
        try:
            while not self._stopping and self._client.is_alive:
                self.turn()
            if not self._client.is_alive:
                reason = "the engine has stopped"
        except Exception as error:
            reason = f"the engine has stopped: {error!r}"
            raise
        finally:
            self._end(reason or "the engine was stopped")
        return reason

    def turn(self) -> None:
        """Take what has come, run one step unless `stop` came meanwhile, send what it did."""
        if not self._client.has_work:
            self._endpoint.wait(_BACKLOG_WAIT_S if self._endpoint.has_backlog else _IDLE_WAIT_S)
        elif (spare_s := self._client.spare_s) >= _SHORTEST_WAIT_S:
            self._endpoint.wait(spare_s)
        for peer, data in self._endpoint.receive():
            self._handle(peer, data)
        for peer in self._endpoint.departed():
            self._departed(peer)
        if self._client.has_work and not self._stopping:
            events = self._client.poll()
            self._deliver(events)
            self._ask_for_slabs()
            if not events and self._parts.engine.is_stalled:
                self._endpoint.wait(_STALL_WAIT_S, self._bell)
                self._bell.hush()
        self._endpoint.flush()

    def _handle(self, peer: Peer, data: bytes) -> None:
        message = _REQUESTS.decode(data)
        match message:
            case m.Submit():
                self._submit(peer, message)
            case m.Abort():
                if self._owners.get(message.request_id) == peer:
                    self._client.abort(message.request_id, message.index)
            case m.AskStats():
                self._send(peer, m.Stats(message.call, self._client.stats()))
            case m.Hello():
                self._hello(peer, message)
            case m.Register():
                self._register(peer, message)
            case m.Withdraw():
                if self._parts.registry.knows(message.uid):
                    with suppress(AdapterNotFound):  # withdrawn before, and still in use
                        self._client.remove_adapter(message.uid)
            case m.Fetched():
                self._store.arrived(message.uid, message.slab, message.failure)

    def _make_store(self, config: EngineConfig, geometry: PageGeometry, dtype: torch.dtype) -> SlabStore:
        """A host tier whose work with drivers and disks is done on threads of its own, beside the steps."""
        is_gpu = config.device != "cpu"
        return SlabStore(
            geometry,
            dtype,
            config.adapter_host_memory_bytes,
            self._want,
            on_arrival=self._bell.ring,
            disk=disk_tier(config, geometry, dtype),
            prepare=PinnedMemory(config.adapter_host_memory_bytes).pin if is_gpu else None,
            executor=image_thread("adapter-pin", config) if is_gpu else None,
        )

    @property
    def _store(self) -> SlabStore:
        store = self._parts.store
        assert isinstance(store, SlabStore)
        return store

    def _submit(self, peer: Peer, message: m.Submit) -> None:
        try:
            self._client.submit(
                message.prompt_token_ids, message.params, message.adapter, message.cache_salt, message.request_id
            )
        except InterleafError as error:
            stale = isinstance(error, AdapterNotFound)
            self._send(peer, m.Refused(message.request_id, m.WireError.of(error), stale))
        else:
            self._owners[message.request_id] = peer

    def _hello(self, peer: Peer, message: m.Hello) -> None:
        if message.role != "publisher":
            self._send(peer, m.Welcome(self._info))
            return
        self._publisher = peer
        parts = self._parts
        dtype = str(parts.pool.data.dtype).removeprefix("torch.")
        uids = tuple(AdapterUid(name) for name in parts.registry.names())
        self._send(peer, m.WelcomePublisher(parts.spec, parts.geometry, dtype, stream_order(parts.config), uids))
        self._wanted.clear()
        for uid, source in self._store.asked():  # of the publisher before this one
            self._want(uid, source)
        self._ask_for_slabs()

    def _register(self, peer: Peer, message: m.Register) -> None:
        try:
            found = self._client.add_adapter(message.uid, message.slab)
            assert found == message.uid, f"slab of {found} for {message.uid}"
        except InterleafError as error:
            self._send(peer, m.Failed(message.call, m.WireError.of(error)))
        else:
            self._send(peer, m.Done(message.call))

    def _want(self, uid: AdapterUid, source: str) -> None:
        """Called from any thread: an image that lies on disk may turn out to be damaged."""
        self._wanted.append(m.Fetch(uid, source))
        self._bell.ring()

    def _ask_for_slabs(self) -> None:
        """Without a publisher what is wanted waits for the next one."""
        if self._publisher is not None:
            while self._wanted:
                self._send(self._publisher, self._wanted.popleft())

    def _departed(self, peer: Peer) -> None:
        if peer == self._publisher:
            self._publisher = None
        for request_id, owner in self._owners.items():
            if owner == peer:
                self._client.abort(request_id)

    def _deliver(self, events: Sequence[Event]) -> None:
        batches: defaultdict[Peer, list[Event]] = defaultdict(list)
        owners = self._owners
        for event in events:
            batches[owners[event.request_id]].append(event)
            if type(event) not in NOT_TERMINAL:
                del owners[event.request_id]
        for peer, batch in batches.items():
            self._send(peer, _sorted(batch))

    def _end(self, reason: str) -> None:
        """Tell everybody, and release everything."""
        self._deliver([RequestFailed(request_id, reason) for request_id in list(self._owners)])
        for peer in self._endpoint.peers():
            self._send(peer, m.Stopping(reason))
        self._endpoint.flush()
        self._client.close()
        self._endpoint.close()
        self._bell.close()

    def _send(self, peer: Peer, message: m.Message) -> None:
        self._endpoint.send(peer, m.encode(message))


_KINDS = (TokenEvent, RequestFinished, RequestAborted, RequestFailed, RequestWaiting)
"""Of events, in the order of the fields of `m.Events`."""


def _sorted(events: Sequence[Event]) -> m.Events:
    of_kind: dict[type[Event], list[Any]] = {kind: [] for kind in _KINDS}
    for event in events:  # many tokens, and hardly ever anything else
        of_kind[type(event)].append(event)
    return m.Events(*map(tuple, of_kind.values()))


def run_engine(parent: Parent) -> int:
    """The engine process. Returns: its exit code."""
    boot = parent.boot
    try:
        server = EngineServer(boot.model, boot, Endpoint(str(Path(boot.run) / ENGINE_SOCKET)), parent)
    except Exception as error:
        parent.failed(error)
        if not isinstance(error, InterleafError):
            raise
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    parent.started(server.parts.rates.note)
    return 0 if server.run() is None else 1
