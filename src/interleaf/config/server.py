"""The server's settings: fields, defaults, limits. Opens no socket, reads no folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

from interleaf.config.rules import Choice, Maybe, Rule, Seconds, Size, Switch, Text, Whole, keep, parse_bytes
from interleaf.errors import ConfigError

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class _Texts:
    """A list of texts that are not empty."""

    wanted: str = "a list of texts that are not empty"

    def kept(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
            raise ValueError
        return tuple(value)


_RULES: Mapping[str, Rule] = {
    "model": Text(),
    "served_model_name": Maybe(Text()),
    "tokenizer": Maybe(Text()),
    "adapters_dir": Maybe(Text()),
    "allow_adapter_root": _Texts(),
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
    "slab_dir": Maybe(Text()),
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
    _require(isinstance(items, Iterable) and not isinstance(items, str), "a table of name = path", adapters)
    for pair in items:  # type: ignore[attr-defined]
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)
        _require(whole, "pairs of a name and a path", pair)
        if pair[0] in found:
            raise ConfigError(f"adapters names {pair[0]!r} twice: {found[pair[0]]!r} and {pair[1]!r}")
        found[pair[0]] = pair[1]
    return tuple(found.items())


def _require(holds: object, wanted: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"adapters must be {wanted}, got {value!r}")
