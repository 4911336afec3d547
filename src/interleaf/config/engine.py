"""The engine's settings: fields, defaults by device, limits, and what contradicts what. Asks no device and no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from interleaf.config.names import unknown_setting
from interleaf.config.rules import (
    Choice,
    Maybe,
    PathText,
    Rule,
    Seconds,
    Share,
    Size,
    SizeOrShare,
    Switch,
    Text,
    Whole,
    checked,
    keep,
    parse_bytes,
)
from interleaf.errors import ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "flashinfer", "triton"]
Admission = Literal["optimistic", "estimated", "conservative"]
Eviction = Literal["cost", "lru"]
PAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64)

_FILLED_IN: Any = None
"""Default of a setting that is given its value by what the others are."""
_CPU_DEFAULTS = {"memory": "1GiB", "max_batch_tokens": 512, "max_num_seqs": 64, "swap_memory": 0}
_GPU_DEFAULTS = {"memory": 0.9, "max_batch_tokens": 8192, "max_num_seqs": 512, "swap_memory": "4GiB"}
_REFILL_SHARE = 16
"""On a GPU the seats are refilled in groups of one in so many."""
_PREFETCH_LOADS = 8
_MAX_SEED = 2**63 - 1
_ADAPTER_DISK_MEMORY = "16GiB"

_DEVICE = Text('"cpu", "cuda" or "cuda:N"', "cpu|cuda(:[0-9]{1,2})?")
_RULES: Mapping[str, Rule] = {
    "dtype": Choice(get_args(Dtype)),
    "load_format": Choice(get_args(LoadFormat)),
    "attention": Choice(get_args(Attention)),
    "memory": SizeOrShare("on a GPU"),
    "memory_split": Maybe(Share()),
    "page_tokens": Choice(PAGE_TOKENS),
    # Beyond these limits a value is a slip of the finger: tables of that size would not fit a machine.
    "max_batch_tokens": Whole(1, 2**20),
    "max_num_seqs": Whole(1, 2**16),
    "refill_seats": Whole(1, 2**16),
    "max_graphs": Whole(0, 2**12),
    "max_model_len": Maybe(Whole(1, 2**31)),
    "adapter_host_memory": Size(),
    "adapter_disk_dir": Maybe(PathText("a folder")),
    "adapter_disk_memory": Maybe(Size()),
    "swap_memory": Size(may_be_zero=True),
    "overlap": Switch(),
    "admission": Choice(get_args(Admission)),
    "eviction": Choice(get_args(Eviction)),
    "copy_rate": Maybe(Size()),
    "prefill_rate": Maybe(Whole(1, 2**40)),
    "prefix_cache": Switch(),
    "max_loads": Whole(1, 2**12),
    "prefetch_loads": Whole(0, 2**12),
    "load_timeout": Seconds(may_be_zero=False),
    "seed": Maybe(Whole(-_MAX_SEED, _MAX_SEED)),
}


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
        adapter_disk_memory: budget of that folder; None: 16 GiB if there is one.
        swap_memory: budget of host memory for what preempted sequences have computed; 0: none, and what has to leave
            the pool is computed again. On a CPU the pool is in the same memory: a larger one does more good.
        overlap: plan step k+1 while step k runs. Off, a step is planned after the one before has been read.
        admission: what must fit in the pool before a sequence starts: its known tokens ("optimistic"), what it and
            those that run are expected to need at once ("estimated"), or all that they may ever need ("conservative":
            nobody is preempted).
        eviction: which idle adapter or prefix leaves first: the one worth least, by the time it takes to bring it back
            and the chance that it will be wanted ("cost"), or the least recently used ("lru").
        copy_rate: bytes a second that an adapter's copy into the pool takes to be, and prefill_rate: tokens of prompts
            a second. The eviction order and preemption reckon with them, and a GPU hands adapters over whose copies
            will have ended when the next step begins: more than is true makes that wait. None: measured at start.
            Setting both makes a run on a CPU repeatable, plan by plan.
        prefix_cache: sequences of one adapter that begin alike share the pages of what they have in common.
        max_loads: adapters on their way to the pool at most.
        prefetch_loads: of those, how many may be for requests that cannot start yet; 0: none. None: 8, or `max_loads`
            if that is less.
        load_timeout: seconds after which an adapter that has not come fails the requests that wait for it.
        seed: of dummy weights and of requests without a seed; None draws one.

    Raises: ConfigError: a value is out of range, or contradicts another.
    """

    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    attention: Attention = "auto"
    memory: int | float | str = _FILLED_IN
    memory_split: float | None = None
    page_tokens: int = 16
    max_batch_tokens: int = _FILLED_IN
    max_num_seqs: int = _FILLED_IN
    refill_seats: int = _FILLED_IN
    max_graphs: int = 256
    max_model_len: int | None = None
    adapter_host_memory: int | str = "4GiB"
    adapter_disk_dir: str | None = None
    adapter_disk_memory: int | str | None = None
    swap_memory: int | str = _FILLED_IN
    overlap: bool = True
    admission: Admission = "estimated"
    eviction: Eviction = "cost"
    copy_rate: int | str | None = None
    prefill_rate: int | None = None
    prefix_cache: bool = False
    max_loads: int = 32
    prefetch_loads: int = _FILLED_IN
    load_timeout: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        keep(self, {"device": _DEVICE})
        self._fill_in()
        keep(self, _RULES)
        if self.memory_fraction is not None and self.device == "cpu":
            raise ConfigError(
                f"memory={self.memory}: a share of the memory is for a GPU, and device is {self.device!r}; give a size "
                'such as "1GiB"'
            )
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not give every running sequence its token"
            )
        if self.prefetch_loads > self.max_loads:
            raise ConfigError(
                f"prefetch_loads={self.prefetch_loads} is over max_loads={self.max_loads}: loads ahead of need are "
                "among all loads, of which no more are ever on their way"
            )
        if self.adapter_disk_memory is not None and self.adapter_disk_dir is None:
            raise ConfigError(
                f"adapter_disk_memory={self.adapter_disk_memory} without adapter_disk_dir: there is no folder that it "
                "is the budget of; name one, or leave the budget away"
            )

    def _fill_in(self) -> None:
        """Give the settings that nobody has set what suits the device and each other."""
        values = dict(_CPU_DEFAULTS if self.device == "cpu" else _GPU_DEFAULTS)
        values["prefetch_loads"] = min(_PREFETCH_LOADS, checked("max_loads", _RULES["max_loads"], self.max_loads))
        if self.adapter_disk_dir is not None:
            values["adapter_disk_memory"] = _ADAPTER_DISK_MEMORY
        seats = values["max_num_seqs"] if self.max_num_seqs is None else self.max_num_seqs
        seats = checked("max_num_seqs", _RULES["max_num_seqs"], seats)
        values["refill_seats"] = 1 if self.device == "cpu" else max(1, seats // _REFILL_SHARE)
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def memory_fraction(self) -> float | None:
        """The share of the GPU's memory that is ours; None if `memory` is a size."""
        return self.memory if isinstance(self.memory, float) else None

    @property
    def memory_bytes(self) -> int:
        """Budget of the pool. Raises: ConfigError: it is a fraction, of a GPU that must be asked."""
        num_bytes: int = checked("memory", Size(), self.memory)
        return num_bytes

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
        """Budget of the disk tier's folder; 0 where there is none."""
        return 0 if self.adapter_disk_memory is None else parse_bytes("adapter_disk_memory", self.adapter_disk_memory)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Settings by name. Raises: ConfigError: a key is unknown (the nearest known one is named)."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_setting(key, known))
        return cls(**settings)
