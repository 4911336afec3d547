"""The server's settings: fields, defaults, limits. Opens no socket, reads no folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, cast, get_args

from interleaf.config.rules import (
    Choice,
    Maybe,
    PathText,
    Rule,
    Seconds,
    Size,
    Switch,
    Text,
    Whole,
    keep,
    parse_bytes,
    shown,
)
from interleaf.errors import ConfigError

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


_TEXT = Text()


@dataclass(frozen=True, slots=True)
class _Texts:
    """A list of texts that are not empty."""

    wanted: str = "a list of texts that are not empty"
    each: Rule = _TEXT

    def kept(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError
        return tuple(self.each.kept(text) for text in value)


_RULES: Mapping[str, Rule] = {
    "model": PathText(),
    "served_model_name": Maybe(Text()),
    "tokenizer": Maybe(PathText()),
    "adapters_dir": Maybe(PathText()),
    "allow_adapter_root": _Texts("a list of folders", PathText()),
    "allow_runtime_loading": Switch(),
    "allow_dummy_adapters": Switch(),
    "host": Text(),
    "port": Whole(0, 65535),
    "api_workers": Whole(1, 64),
    "protect_metrics": Switch(),
    "cors_origin": _Texts(),
    "max_waiting": Whole(1, 10**6),
    "max_connections": Whole(1, 10**6),
    "max_body_bytes": Size(),
    "max_header_bytes": Size(),
    "header_timeout": Seconds(),
    "body_timeout": Seconds(),
    "keep_alive": Seconds(),
    "drain_timeout": Seconds(),
    "exit_after": Maybe(Seconds()),
    "slab_dir": Maybe(PathText()),
    "publisher_threads": Maybe(Whole(1, 64)),
    "log_format": Choice(get_args(LogFormat)),
    "log_level": Choice(get_args(LogLevel)),
    "metrics_adapters": Whole(0, 10**4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What is served, to whom, and within which limits. `interleaf serve --help` describes every field.

    Attributes:
        adapters: (name, path) of the adapters that must load before the port opens.
        api_key: any one of these opens the server; none means that everybody who reaches the port is served.
        exit_after: seconds from the engine's death to the exit; None keeps answering 503 until stopped.
        publisher_threads: adapters that are registered at a time, and as many brought back; None: one for every four
            cores, 8 at most.

    Raises: ConfigError: a value is out of range.
    """

    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None

    adapters: tuple[tuple[str, str], ...] = ()
    adapters_dir: str | None = None
    allow_adapter_root: tuple[str, ...] = ()
    allow_runtime_loading: bool = False
    allow_dummy_adapters: bool = False

    host: str = "127.0.0.1"
    port: int = 8000
    api_workers: int = 1
    api_key: tuple[str, ...] = ()
    protect_metrics: bool = False
    cors_origin: tuple[str, ...] = ()

    max_waiting: int = 256
    max_connections: int = 1024
    max_body_bytes: int | str = "4MiB"
    max_header_bytes: int | str = "32KiB"
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    keep_alive: float = 30.0
    drain_timeout: float = 30.0
    exit_after: float | None = None
    slab_dir: str | None = None
    publisher_threads: int | None = None

    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    metrics_adapters: int = 100

    def __post_init__(self) -> None:
        keep(self, _RULES)
        try:
            object.__setattr__(self, "api_key", _Texts().kept(self.api_key))
        except ValueError:  # a key is never printed
            raise ConfigError(f"api_key must be {_Texts().wanted}, got something else") from None
        object.__setattr__(self, "adapters", _pairs(self.adapters))

    @property
    def max_body(self) -> int:
        """Bytes of a request's body at most."""
        return parse_bytes("max_body_bytes", self.max_body_bytes)

    @property
    def max_header(self) -> int:
        """Bytes of a request's line and headers at most."""
        return parse_bytes("max_header_bytes", self.max_header_bytes)

    @property
    def name(self) -> str:
        """The name under which the base model is served."""
        if self.served_model_name is not None:
            return self.served_model_name
        return PurePath(self.model).name.removesuffix(".gguf") or self.model


def _pairs(adapters: object) -> tuple[tuple[str, str], ...]:
    """(name, path) pairs, each name once."""
    found: dict[str, str] = {}
    items = adapters.items() if isinstance(adapters, Mapping) else adapters
    try:
        if isinstance(items, str | bytes):
            raise TypeError
        pairs = [*cast(Iterable[object], items)]
    except TypeError:
        raise ConfigError(f"adapters must be a table of name = path, got {shown(adapters)}") from None
    for pair in pairs:
        try:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError
            name, path = Text().kept(pair[0]), PathText().kept(pair[1])
        except ValueError:
            raise ConfigError(f"adapters must be pairs of a name and a path, got {shown(pair)}") from None
        if name in found:
            raise ConfigError(f"adapters names {shown(name)} twice: {shown(found[name])} and {shown(path)}")
        found[name] = path
    return tuple(found.items())
