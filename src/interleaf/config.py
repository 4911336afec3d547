"""Every setting, frozen, with its default and its limits. Unknown keys are refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, cast

from interleaf.errors import ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "flashinfer", "triton"]
Admission = Literal["optimistic", "estimated", "conservative"]
Eviction = Literal["cost", "lru"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
PAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_LIMITS = {
    "max_batch_tokens": 2**20,
    "max_num_seqs": 2**16,
    "max_model_len": 2**31,
    "refill_seats": 2**16,
    "max_graphs": 2**12,
    "max_loads": 2**12,
    "prefetch_loads": 2**12,
    "prefill_rate": 2**40,
}
"""Beyond these a value is a slip of the finger: tables of that size would not fit a machine."""

_BY_DEVICE: Any = None
"""Default of a setting that is given its value by `device`."""
_CPU_DEFAULTS = {"memory": "1GiB", "max_batch_tokens": 512, "max_num_seqs": 64, "swap_memory": 0}
_GPU_DEFAULTS = {"memory": 0.9, "max_batch_tokens": 8192, "max_num_seqs": 512, "swap_memory": "4GiB"}
_REFILL_SHARE = 16
"""On a GPU the seats are refilled in groups of one in so many."""


def parse_bytes(name: str, value: int | str, *, may_be_zero: bool = False) -> int:
    """Bytes from a number or from text such as "512MiB" (powers of 1024) or "2GB" (powers of 1000).

    Raises: ConfigError: the text is no size, or the size is not positive, or negative if it may be zero.
    """
    if may_be_zero and not isinstance(value, bool) and str(value).strip() == "0":
        return 0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f'{name} must be a size such as "512MiB" or "2GB", got {value!r}')
        try:
            value = int(float(match[1]) * unit)
        except OverflowError:
            raise ConfigError(f"{name} is beyond every machine: {match[0][:20]}...") from None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive number of bytes, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        dtype: of weights, KV cache and adapters; "auto" takes the checkpoint's own, and float32 on a CPU.
        load_format: how weights are found; "auto" goes by what lies at the path, "dummy" makes them by `seed`.
        device: "cpu", "cuda" or "cuda:N".
        attention: on a GPU: "flashinfer", "triton" (our own kernels), or "auto": the first where it can be had.
        memory: budget of the page pool: a size ("1GiB", or bytes); on a GPU also a fraction below 1 of all its memory,
            of which the weights and what a step needs are taken first.
        memory_split: a share of the pool's pages, between 0 and 1, for adapters and for nothing else; None: they share
            all of it with KV. It is what the shared pool replaces, there to be compared with.
        page_tokens: tokens of KV in a page; small pages waste less on small adapters, large ones need fewer indices.
        max_batch_tokens: rows computed in one step at most; long prompts are computed in chunks of what is left.
        max_num_seqs: sequences that run at a time at most.
        refill_seats: seats that must be free before prompts are computed while others decode. On a GPU prompts are
            computed in groups, so that most steps replay a graph; it delays nobody while more seats than that are free.
        max_graphs: captured decode steps that a GPU keeps; 0 captures none.
        max_model_len: prompt + max_tokens at most; None takes the model's own context.
        adapter_host_memory: budget of host memory for registered adapters; beyond it they are read from disk again.
        adapter_disk_dir: folder for copies, laid out, of adapters that host memory has no room for; None: no copies are
            made, and they are read from their sources. Several engines may share one.
        adapter_disk_memory: budget of that folder.
        swap_memory: budget of host memory for what preempted sequences have computed; 0: none, and what has to leave
            the pool is computed again. On a CPU the pool is in the same memory: a larger one does more good.
        overlap: plan step k+1 while step k runs. Off, a step is planned after the one before has been read.
        admission: what must fit in the pool before a sequence starts: its known tokens ("optimistic"), what it and
            those that run are expected to need at once ("estimated"), or all that they may ever need ("conservative":
            nobody is preempted).
        eviction: which idle adapter or prefix leaves first: the one worth least, by the time it takes to bring it back
            and the chance that it will be wanted ("cost"), or the least recently used ("lru").
        copy_rate: bytes a second that an adapter's copy into the pool takes to be, and prefill_rate: tokens of prompts
            a second. The eviction order and preemption reckon with them. None: measured at start. Setting both makes a
            run repeatable, plan by plan.
        prefix_cache: sequences of one adapter that begin alike share the pages of what they have in common.
        max_loads: adapters on their way to the pool at most.
        prefetch_loads: of those, how many may be for requests that cannot start yet; 0: none.
        load_timeout: seconds after which an adapter that has not come fails the requests that wait for it.
        seed: of dummy weights and of requests without a seed; None draws one.

    Raises: ConfigError: a value is out of range.
    """

    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    attention: Attention = "auto"
    memory: int | float | str = _BY_DEVICE
    memory_split: float | None = None
    page_tokens: int = 16
    max_batch_tokens: int = _BY_DEVICE
    max_num_seqs: int = _BY_DEVICE
    refill_seats: int = _BY_DEVICE
    max_graphs: int = 256
    max_model_len: int | None = None
    adapter_host_memory: int | str = "4GiB"
    adapter_disk_dir: str | None = None
    adapter_disk_memory: int | str = "16GiB"
    swap_memory: int | str = _BY_DEVICE
    overlap: bool = True
    admission: Admission = "estimated"
    eviction: Eviction = "cost"
    copy_rate: int | str | None = None
    prefill_rate: int | None = None
    prefix_cache: bool = False
    max_loads: int = 32
    prefetch_loads: int = 8
    load_timeout: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", Dtype), ("load_format", LoadFormat), ("attention", Attention), ("admission", Admission),
            ("eviction", Eviction),
        ):  # fmt: skip
            if getattr(self, name) not in allowed.__args__:  # type: ignore[attr-defined]
                raise ConfigError(f"{name} must be one of {', '.join(allowed.__args__)}, got {getattr(self, name)!r}")  # type: ignore[attr-defined]
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", self.device):
            raise ConfigError(f'device must be "cpu", "cuda" or "cuda:N", got {self.device!r}')
        self._fill_in()
        for name in ("adapter_host_memory", "adapter_disk_memory"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        object.__setattr__(self, "swap_memory", self.swap_memory_bytes)
        object.__setattr__(self, "copy_rate", self.copy_rate_bytes)
        folder = self.adapter_disk_dir
        _require(folder is None or (isinstance(folder, str) and folder), "adapter_disk_dir", "a folder", folder)
        fraction = _fraction(self.memory)
        if fraction is not None and self.device == "cpu":
            raise ConfigError(
                f"memory={self.memory}: a share of the memory is for a GPU, and device is {self.device!r}; give a size "
                'such as "1GiB"'
            )
        if fraction is None:
            object.__setattr__(self, "memory", parse_bytes("memory", cast(int | str, self.memory)))
        else:
            object.__setattr__(self, "memory", fraction)
        if self.memory_split is not None:
            share = _fraction(self.memory_split)
            _require(share, "memory_split", "a share between 0 and 1", self.memory_split)
            object.__setattr__(self, "memory_split", share)
        if isinstance(self.page_tokens, bool | float) or self.page_tokens not in PAGE_TOKENS:
            raise ConfigError(f"page_tokens must be one of {', '.join(map(str, PAGE_TOKENS))}, got {self.page_tokens}")
        for name, least in (
            ("max_batch_tokens", 1), ("max_num_seqs", 1), ("max_model_len", 1), ("refill_seats", 1), ("max_graphs", 0),
            ("max_loads", 1), ("prefetch_loads", 0), ("prefill_rate", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if name in ("max_model_len", "prefill_rate") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LIMITS[name]:
                raise ConfigError(f"{name} must be a whole number from {least} to {_LIMITS[name]}, got {value!r}")
        for name in ("overlap", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        timeout = self.load_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86400:
            raise ConfigError(f"load_timeout must be a number of seconds over 0, 86400 at most, got {timeout!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not give every running sequence its token"
            )

    def _fill_in(self) -> None:
        """Give the settings that nobody has set what suits the device."""
        defaults = dict(_CPU_DEFAULTS if self.device == "cpu" else _GPU_DEFAULTS)
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.refill_seats is None and isinstance(self.max_num_seqs, int):
            group = 1 if self.device == "cpu" else max(1, self.max_num_seqs // _REFILL_SHARE)
            object.__setattr__(self, "refill_seats", group)

    @property
    def memory_fraction(self) -> float | None:
        """The share of the GPU's memory that is ours; None if `memory` is a size."""
        return _fraction(self.memory)

    @property
    def memory_bytes(self) -> int:
        """Budget of the pool. Raises: ConfigError: it is a fraction, of a GPU that must be asked."""
        return parse_bytes("memory", cast(int | str, self.memory))

    @property
    def adapter_host_memory_bytes(self) -> int:
        return parse_bytes("adapter_host_memory", self.adapter_host_memory)

    @property
    def swap_memory_bytes(self) -> int:
        return parse_bytes("swap_memory", self.swap_memory, may_be_zero=True)

    @property
    def copy_rate_bytes(self) -> int | None:
        return None if self.copy_rate is None else parse_bytes("copy_rate", self.copy_rate)

    @property
    def adapter_disk_memory_bytes(self) -> int:
        return parse_bytes("adapter_disk_memory", self.adapter_disk_memory)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Settings by name. Raises: ConfigError: a key is unknown (the nearest known one is named)."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_setting(key, known))
        return cls(**settings)


def _fraction(value: object) -> float | None:
    """A share of the memory, between 0 and 1, given as a number or as text; None if it is something else."""
    if isinstance(value, bool) or not isinstance(value, float | str):
        return None
    try:
        share = float(value)
    except ValueError:
        return None
    return share if 0.0 < share < 1.0 else None


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
        for name in ("model", "host"):
            _require(isinstance(getattr(self, name), str) and getattr(self, name), name, "a text", getattr(self, name))
        for name in ("served_model_name", "tokenizer", "adapters_dir", "slab_dir"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and value), name, "a text that is not empty", value)
        for name in ("allow_adapter_root", "api_key", "cors_origin"):
            values = getattr(self, name)
            whole = isinstance(values, list | tuple) and all(isinstance(value, str) and value for value in values)
            shown = "something else" if name == "api_key" else values  # a key is never printed
            _require(whole, name, "a list of texts that are not empty", shown)
            object.__setattr__(self, name, tuple(values))
        object.__setattr__(self, "adapters", _pairs(self.adapters))
        for name in ("allow_runtime_loading", "allow_dummy_adapters", "protect_metrics"):
            _require(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))
        for name, low, high in (
            ("port", 0, 65535), ("api_workers", 1, 64), ("max_waiting", 1, 10**6), ("max_connections", 1, 10**6),
            ("metrics_adapters", 0, 10**4), ("publisher_threads", 1, 64),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "publisher_threads" and value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            _require(whole, name, f"a whole number from {low} to {high}", value)
        for name in ("max_body_bytes", "max_header_bytes"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        for name in ("header_timeout", "body_timeout", "keep_alive", "drain_timeout", "exit_after"):
            value = getattr(self, name)
            if name == "exit_after" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 86400
            _require(number, name, "a number of seconds from 0 to 86400", value)
        for name, allowed in (("log_format", LogFormat), ("log_level", LogLevel)):
            choices = allowed.__args__  # type: ignore[attr-defined]
            _require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}", getattr(self, name))

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


_ELSEWHERE = {
    "gpu_memory_utilization": "memory, a share of the GPU's memory",
    "lora_modules": "adapters (--adapter NAME=PATH)",
    "enable_lora": "not needed: adapters may always be used",
    "max_loras": "not needed: adapters in use are bounded by the pool's pages",
    "max_lora_rank": "not needed: any rank is taken",
    "max_cpu_loras": "adapter_host_memory, in bytes",
    "enable_prefix_caching": "prefix_cache",
    "swap_space": "swap_memory",
    "block_size": "page_tokens",
    "max_num_batched_tokens": "max_batch_tokens",
}
"""vLLM's names of what we call otherwise."""


def unknown_setting(key: str, known: Sequence[str]) -> str:
    """Say that `key` is unknown, and name the nearest known one."""
    if key in _ELSEWHERE:
        return f"unknown setting {key!r}: here it is {_ELSEWHERE[key]}"
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")


def _require(holds: object, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def _pairs(adapters: object) -> tuple[tuple[str, str], ...]:
    """(name, path) pairs, each name once."""
    found: dict[str, str] = {}
    items = adapters.items() if isinstance(adapters, Mapping) else adapters
    _require(isinstance(items, Iterable) and not isinstance(items, str), "adapters", "a table of name = path", adapters)
    for pair in items:  # type: ignore[attr-defined]
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)
        _require(whole, "adapters", "pairs of a name and a path", pair)
        if pair[0] in found:
            raise ConfigError(f"adapters names {pair[0]!r} twice: {found[pair[0]]!r} and {pair[1]!r}")
        found[pair[0]] = pair[1]
    return tuple(found.items())
