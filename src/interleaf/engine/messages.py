"""What processes say to each other: msgspec structs around the dataclasses of core. Knows no socket.

    API process ──Submit, Abort, AskStats──▶ engine ──Refused, Events, Stats──▶ API process
    publisher ──Register, Withdraw, Fetched──▶ engine ──Done, Failed, Fetch──▶ publisher
    API process ──Load, Unload, AskNames──▶ publisher ──Loaded, Done, Names, Failed, Renamed──▶ API process

Every conversation begins with Hello and its answer. Text and tensors never travel: tokens do, and paths of slabs.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from interleaf.config import EngineConfig
from interleaf.core import (
    AdapterUid,
    ModelSpec,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestWaiting,
    SamplingParams,
    StreamOrder,
    TokenEvent,
)
from interleaf.engine.serving import EngineInfo
from interleaf.errors import InterleafError
from interleaf.memory.geometry import PageGeometry
from interleaf.stats import EngineStats

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. On the wire: an array, its first element the name of the type."""


# ---------------------------------------------------------------------------------------------------- to the engine


class Hello(Message, frozen=True):
    """A process wants to talk. Answered by Welcome, or WelcomePublisher."""

    role: str


class Submit(Message, frozen=True):
    """A request with an id of its sender's making, unique among all senders. Answered by Events, or Refused."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterUid | None
    cache_salt: str | None = None


class Abort(Message, frozen=True):
    """End a request, or one of its sequences. No answer of its own."""

    request_id: str
    index: int | None


class AskStats(Message, frozen=True):
    """Answered by Stats."""

    call: int


class Register(Message, frozen=True):
    """A slab is ready: the engine maps it, and unlinks it. Answered by Done or Failed."""

    call: int
    uid: AdapterUid
    slab: str


class Withdraw(Message, frozen=True):
    """No name points to an adapter any more: it goes with its last request."""

    uid: AdapterUid


class Fetched(Message, frozen=True):
    """The answer to Fetch: a slab, or why there is none."""

    uid: AdapterUid
    slab: str | None
    failure: str | None


# ---------------------------------------------------------------------------------------------------- from the engine


class Welcome(Message, frozen=True):
    """The engine's answer to an API process."""

    info: EngineInfo


class WelcomePublisher(Message, frozen=True):
    """The engine's answer to a publisher: how adapters are laid out, and those that it holds."""

    spec: ModelSpec
    geometry: PageGeometry
    dtype: str
    order: StreamOrder
    uids: tuple[AdapterUid, ...]


class Events(Message, frozen=True):
    """All that one step did for one API process. Of one request, tokens come before its end."""

    tokens: tuple[TokenEvent, ...] = ()
    finished: tuple[RequestFinished, ...] = ()
    aborted: tuple[RequestAborted, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    waiting: tuple[RequestWaiting, ...] = ()


class Refused(Message, frozen=True):
    """A request was not accepted. With `is_stale` its adapter has been withdrawn: resolve the name again."""

    request_id: str
    error: WireError
    is_stale: bool = False


class Stats(Message, frozen=True):
    """The answer to AskStats."""

    call: int
    stats: EngineStats


class Fetch(Message, frozen=True):
    """An image has left memory and is wanted again, of the source that it had. Answered by Fetched."""

    uid: AdapterUid
    source: str


class Stopping(Message, frozen=True):
    """The engine's last word; all events have gone before."""

    reason: str


# ---------------------------------------------------------------------------------------------------- the publisher


class Load(Message, frozen=True):
    """Read an adapter and give it a name. Answered by Loaded or Failed."""

    call: int
    name: str
    source: str


class Unload(Message, frozen=True):
    """Take a name away. Answered by Done or Failed."""

    call: int
    name: str


class AskNames(Message, frozen=True):
    """Answered by Names."""

    call: int


class Loaded(Message, frozen=True):
    """The answer to Load. The Renamed that made the name visible has gone before."""

    call: int
    uid: AdapterUid


class Names(Message, frozen=True):
    """The whole table of names."""

    call: int
    version: int
    uids: dict[str, AdapterUid]


class Renamed(Message, frozen=True):
    """The one change that makes a table's version `version`: a name now means `uid`, or nothing."""

    version: int
    name: str
    uid: AdapterUid | None


# ---------------------------------------------------------------------------------------------------- answers


class Taken(Message, frozen=True):
    """A call has arrived and is being carried out; its answer follows."""

    call: int


class Done(Message, frozen=True):
    """A call has been carried out."""

    call: int


class Failed(Message, frozen=True):
    """A call has not been carried out."""

    call: int
    error: WireError


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An exception of `interleaf.errors`: its class, its message and its attributes."""

    kind: str
    message: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """What remains of an exception. One that is not ours keeps its type as text."""
        if isinstance(error, InterleafError):
            return cls(type(error).__name__, str(error), dict(vars(error)))
        return cls(InterleafError.__name__, f"{type(error).__name__}: {error}", {})

    def exception(self) -> InterleafError:
        """The exception again, with the class, message and attributes that it had."""
        found = _error_classes().get(self.kind, InterleafError)
        error = found.__new__(found)
        error.args = (self.message,)
        for name, value in self.attributes.items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error


# ---------------------------------------------------------------------------------------------------- a child's start


class Boot(msgspec.Struct, frozen=True):
    """What a child process is told when it starts.

    Attributes:
        run: folder of this run's sockets and journal, private to its owner.
        slabs: folder of this run's slabs.
        entry: of an API process, "module:function"; its settings are plain values.
        name: of the child, and of whoever takes its place.
        publisher_threads: adapters that are read and laid out at a time; 0: by the machine's cores.
    """

    run: str
    slabs: str
    model: str = ""
    config: EngineConfig = EngineConfig()
    entry: str = ""
    settings: dict[str, Any] = {}
    listeners: tuple[int, ...] = ()
    name: str = ""
    publisher_threads: int = 0


class Started(Message, frozen=True):
    """A child is ready. What it has to say is for the log."""

    note: str = ""


class StartFailed(Message, frozen=True):
    """A child cannot start."""

    error: WireError


class Progress(Message, frozen=True):
    """How far a child has come before it is ready."""

    what: str
    done: int
    total: int


ToEngine = Hello | Submit | Abort | AskStats | Register | Withdraw | Fetched
ToApi = Welcome | Events | Refused | Stats | Stopping
EngineToPublisher = WelcomePublisher | Done | Failed | Fetch | Stopping
ToPublisher = Hello | Load | Unload | AskNames
FromPublisher = Taken | Loaded | Done | Names | Failed | Renamed
Report = Started | StartFailed | Progress

encode = msgspec.msgpack.Encoder().encode
"""Bytes of a message."""


def _error_classes() -> dict[str, type[InterleafError]]:
    found, waiting = {}, [InterleafError]
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found
