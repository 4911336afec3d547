"""What a row of the benchmark asks for: a trace, a set of adapters, and how often. Knows no engine and no tensor.

A row is written TRACE:ADAPTERS[:OPTION=VALUE...]; TRACE is a file, or the name of one in bench/traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from interleaf.core import Module
from interleaf.errors import ConfigError

TRACES = Path(__file__).parent / "traces"
MODELS = Path(__file__).parent / "models"

_QKVO = (Module.Q, Module.K, Module.V, Module.O)


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Adapters by index: adapter i has `ranks[i % len(ranks)]` on each of `modules`."""

    name: str
    ranks: tuple[int, ...]
    modules: tuple[Module, ...]

    def rank(self, index: int) -> int:
        return self.ranks[index % len(self.ranks)]


# S1 to S6: the settings of the S-LoRA paper (arXiv 2311.03285).
_SETS = {
    "s1": AdapterSet("s1", (8,), _QKVO),
    "s2": AdapterSet("s2", (64, 32, 16, 8), _QKVO),
    "s4": AdapterSet("s4", (64, 32, 16), _QKVO),
    "s5": AdapterSet("s5", (32,), _QKVO),
    "s6": AdapterSet("s6", (64,), _QKVO),
}
_SYNTAX = re.compile(r"r([1-9][0-9]{0,2})-(all|qkvo)")


def adapter_set(name: str) -> AdapterSet | None:
    """The adapters that a name stands for: "none", "s1" ... "s6", or such as "r16-all" and "r8-qkvo".

    Raises: ConfigError: there is no such set.
    """
    if name == "none":
        return None
    if name in _SETS:
        return _SETS[name]
    match = _SYNTAX.fullmatch(name)
    if match is None:
        raise ConfigError(f"adapters must be none, {', '.join(_SETS)}, r<rank>-all or r<rank>-qkvo, got {name!r}")
    return AdapterSet(name, (int(match[1]),), tuple(Module) if match[2] == "all" else _QKVO)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        trace: file of the requests.
        share: cap the pool at 13 GB and this share of the bytes of the adapters asked for; None: no cap.
        limit: take only so many requests of the trace.
        settings: fields of `interleaf.config.EngineConfig` for this row; rows that agree in them share an engine.
    """

    trace: Path
    adapters: str
    repeat: int = 1
    share: float | None = None
    limit: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def trace_name(self) -> str:
        return self.trace.stem


def parse_row(text: str, defaults: Row) -> Row:
    """A row from TRACE:ADAPTERS[:OPTION=VALUE...]; what it does not say is as in `defaults`.

    Options are repeat, share and limit; any other is an engine setting, as in max_num_seqs=512.

    Raises: ConfigError: the text is malformed, or the trace does not exist.
    """
    parts = text.strip().split(":")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"a row is TRACE:ADAPTERS[:OPTION=VALUE...], got {text!r}")
    adapter_set(parts[1])
    own: dict[str, Any] = {}
    settings = dict(defaults.settings)
    for option in parts[2:]:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: {option!r} is not OPTION=VALUE")
        try:
            match name:
                case "repeat" | "limit":
                    own[name] = int(value)
                case "share":
                    own[name] = float(value)
                case _:
                    settings |= parse_setting(option)
        except ValueError:
            raise ConfigError(f"{text!r}: {name} must be a number, got {value!r}") from None
    return Row(
        trace=trace_path(parts[0]),
        adapters=parts[1],
        repeat=own.get("repeat", defaults.repeat),
        share=own.get("share", defaults.share),
        limit=own.get("limit", defaults.limit),
        settings=settings,
    )


def parse_setting(text: str) -> dict[str, Any]:
    """An engine setting from NAME=VALUE. Sizes stay text; numbers, true, false and null are what JSON makes of them."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"a setting is NAME=VALUE, got {text!r}")
    if name == "memory":
        return {name: value}
    try:
        return {name: json.loads(value)}
    except json.JSONDecodeError:
        return {name: value}


def trace_path(name: str) -> Path:
    """The file of a trace. Raises: ConfigError: there is none."""
    for path in (Path(name), TRACES / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise ConfigError(f"{name}: no such trace, neither a file nor in {TRACES.name}/")


def model_path(name: str) -> Path:
    """The configuration of a model: a path, or the name of one in bench/models. Raises: ConfigError: there is none."""
    for path in (Path(name), MODELS / f"{name}.json"):
        if path.exists():
            return path
    raise ConfigError(f"{name}: no such model, neither a path nor one of {', '.join(known_models())}")


def known_models() -> list[str]:
    return sorted(path.stem for path in MODELS.glob("*.json"))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        arrival_s: seconds after the start; 0 in a saturated trace.
        adapter: index in the set; None is the base model.
        output_tokens: exactly that many are generated.
    """

    arrival_s: float
    adapter: int | None
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace, in order of arrival. Raises: ConfigError: a line is malformed, or there is none."""
    requests: list[TraceRequest] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append(TraceRequest(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: not a request of a trace: {error}") from error
    if not requests:
        raise ConfigError(f"{path}: holds no requests")
    requests.sort(key=lambda request: request.arrival_s)
    return requests[:limit]


def asked_for(requests: Sequence[TraceRequest]) -> list[int]:
    """The adapters that a trace really asks for, ascending."""
    return sorted({request.adapter for request in requests if request.adapter is not None})


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths)).tolist()
    prompts, first = [], 0
    for length in lengths:
        prompts.append(tuple(tokens[first : first + length]))
        first += length
    return prompts
