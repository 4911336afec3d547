"""One option of `interleaf serve`: its spellings, its unit, its default in words. Knows no option but by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from interleaf.config import EngineConfig, ServerConfig

PREFIX = "INTERLEAF_"


class Kind(StrEnum):
    """How an option is written; the value is what `--help` shows where an option has no unit of its own."""

    TEXT = "TEXT"
    PATH = "PATH"
    WHOLE = "N"
    SECONDS = "SECONDS"
    SIZE = "SIZE"
    SWITCH = ""
    TEXTS = "TEXT ..."
    PATHS = "DIR ..."
    PAIRS = "NAME=PATH ..."

    @property
    def is_many(self) -> bool:
        return self in (Kind.TEXTS, Kind.PATHS, Kind.PAIRS)


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: its key in TOML, and the field of ServerConfig or EngineConfig.
        flag: on the command line.   variable: in the environment.
        unit: what its value counts or is; empty: as its kind says.
        unset: in words, what holds where nobody says anything and no value stands for it.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    unset: str = ""
    singular: str = ""
    group: str = ""

    @property
    def flag(self) -> str:
        return "--" + (self.singular or self.name).replace("_", "-")

    @property
    def flags(self) -> str:
        """As one may write it: a switch can be turned off, too."""
        return f"{self.flag} / --no-{self.flag[2:]}" if self.kind is Kind.SWITCH else self.flag

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        """What stands for the value behind the flag; empty for a switch."""
        return self.unit or self.kind.value.removesuffix(" ...")

    @property
    def default(self) -> str:
        """What holds when nobody says anything, as `--help` and the table say it; empty for `model` and for nothing."""
        on_cpu, on_gpu = (self._shown(_DEFAULTS[device].get(self.name)) for device in ("cpu", "cuda"))
        if not on_cpu:
            return self.unset
        return on_cpu if on_cpu == on_gpu else f"{on_cpu}, on a GPU {on_gpu}"

    def _shown(self, value: object) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.kind is Kind.SIZE and isinstance(value, int):
            return shown_bytes(value)
        if isinstance(value, float):
            return f"{value:g}"
        return "" if value in (None, ()) else str(value)


def _defaults(config: EngineConfig | ServerConfig) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    device: _defaults(ServerConfig(model="none"))
    | _defaults(EngineConfig(device=device))
    | {"model": None, "device": "cpu"}
    for device in ("cpu", "cuda")
}
"""By the device that computes; what is not there is none."""


def shown_bytes(num_bytes: int) -> str:
    """A size as one would write it: 4GiB, 32KiB, or the bytes if it is no multiple of 1024."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)
