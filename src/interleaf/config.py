"""Every setting, frozen, with its default and its limits. Unknown keys are refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from interleaf.errors import ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
PAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from a number or from text such as "512MiB" (powers of 1024) or "2GB" (powers of 1000).

    Raises: ConfigError: the text is no size, or the size is not positive.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f'{name} must be a size such as "512MiB" or "2GB", got {value!r}')
        value = int(float(match[1]) * unit)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a positive number of bytes, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        dtype: of weights, KV cache and adapters; "auto" takes the checkpoint's own, and float32 on a CPU.
        load_format: how weights are found; "auto" goes by what lies at the path, "dummy" makes them by `seed`.
        device: "cpu" (a GPU comes with a later release).
        memory: budget of the page pool: a size ("1GiB", or bytes).
        page_tokens: tokens of KV in a page; small pages waste less on small adapters, large ones need fewer indices.
        max_batch_tokens: rows computed in one step at most; long prompts are computed in chunks of what is left.
        max_num_seqs: sequences that run at a time at most.
        max_model_len: prompt + max_tokens at most; None takes the model's own context.
        adapter_host_memory: budget of host memory for registered adapters; beyond it they are read from disk again.
        overlap: plan step k+1 while step k runs. Off, a step is planned after the one before has been read.
        seed: of dummy weights and of requests without a seed; None draws one.

    Raises: ConfigError: a value is out of range.
    """

    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    device: str = "cpu"
    memory: int | str = "1GiB"
    page_tokens: int = 16
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    adapter_host_memory: int | str = "4GiB"
    overlap: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", Dtype), ("load_format", LoadFormat)):
            if getattr(self, name) not in allowed.__args__:  # type: ignore[attr-defined]
                raise ConfigError(f"{name} must be one of {', '.join(allowed.__args__)}, got {getattr(self, name)!r}")  # type: ignore[attr-defined]
        if self.device != "cpu":
            raise ConfigError(f'device must be "cpu", got {self.device!r}')
        for name in ("memory", "adapter_host_memory"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        if self.page_tokens not in PAGE_TOKENS:
            raise ConfigError(f"page_tokens must be one of {', '.join(map(str, PAGE_TOKENS))}, got {self.page_tokens}")
        for name in ("max_batch_tokens", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if name == "max_model_len" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not give every running sequence its token"
            )

    @property
    def memory_bytes(self) -> int:
        return parse_bytes("memory", self.memory)

    @property
    def adapter_host_memory_bytes(self) -> int:
        return parse_bytes("adapter_host_memory", self.adapter_host_memory)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Settings by name. Raises: ConfigError: a key is unknown (the nearest known one is named)."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}{hint}")
        return cls(**settings)
