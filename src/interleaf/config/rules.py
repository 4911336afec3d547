"""What a setting's value may be: one class for each kind, all with one message. Knows no setting."""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from interleaf.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_MAX_BYTES = 2**50
"""1 PiB: more is a slip of the finger."""

_MAX_SECONDS = 86400
_MAX_SHOWN = 60


class Rule(Protocol):
    """What a setting's value may be."""

    @property
    def wanted(self) -> str:
        """The limit in words, as in "... must be a whole number from 1 to 64"."""

    def kept(self, value: object) -> Any:
        """The value as the setting keeps it. Raises: ValueError: it breaks the rule."""


def checked(name: str, rule: Rule, value: object) -> Any:
    """The value as the setting keeps it. Raises: ConfigError: it breaks the rule; names setting, limit and value."""
    try:
        return rule.kept(value)
    except ValueError:
        raise ConfigError(f"{name} must be {rule.wanted}, got {shown(value)}") from None


def keep(config: object, rules: Mapping[str, Rule]) -> None:
    """Check the fields of a frozen dataclass that is being made, and put in their place what they keep.

    Raises: ConfigError: the first of them that breaks its rule.
    """
    for name, rule in rules.items():
        object.__setattr__(config, name, checked(name, rule, getattr(config, name)))


def parse_bytes(name: str, value: int | str, *, may_be_zero: bool = False) -> int:
    """Bytes from a number or from text such as "512MiB" (powers of 1024) or "2GB" (powers of 1000).

    Raises: ConfigError: the text is no size; the size is 0, unless it may be, below 0, or over 1 PiB.
    """
    size: int = checked(name, Size(may_be_zero=may_be_zero), value)
    return size


@dataclass(frozen=True, slots=True)
class Maybe:
    """What another rule says, or None."""

    rule: Rule

    @property
    def wanted(self) -> str:
        return self.rule.wanted

    def kept(self, value: object) -> Any:
        return None if value is None else self.rule.kept(value)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def wanted(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def kept(self, value: object) -> int:
        number = _whole(value)
        if not self.low <= number <= self.high:
            raise ValueError
        return number


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time, a day at most."""

    may_be_zero: bool = True

    @property
    def wanted(self) -> str:
        return f"a number of seconds {'from 0 to' if self.may_be_zero else 'over 0, at most'} {_MAX_SECONDS}"

    def kept(self, value: object) -> float:
        seconds = _real(value)
        if not 0 <= seconds <= _MAX_SECONDS or not (seconds or self.may_be_zero):
            raise ValueError  # NaN is one of these
        return seconds


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a number, or text such as "512MiB". Kept as a number."""

    may_be_zero: bool = False

    @property
    def wanted(self) -> str:
        low = "0 for none, or " if self.may_be_zero else ""
        return f'{low}a size such as "512MiB" or "2GB", over 0 and at most 1024TiB'

    def kept(self, value: object) -> int:
        num_bytes = _bytes_of(value) if isinstance(value, str) else _whole(value)
        if not 0 <= num_bytes <= _MAX_BYTES or not (num_bytes or self.may_be_zero):
            raise ValueError
        return num_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """A share of something: a number over 0 and below 1, or the same as text."""

    @property
    def wanted(self) -> str:
        return "a share between 0 and 1, excluding both"

    def kept(self, value: object) -> float:
        share = float(value) if isinstance(value, str) else _real(value)
        if not 0.0 < share < 1.0:
            raise ValueError
        return share


@dataclass(frozen=True, slots=True)
class SizeOrShare:
    """Bytes, or a share of what there is."""

    of: str

    @property
    def wanted(self) -> str:
        return f"{Size().wanted}, or {self.of} {Share().wanted}"

    def kept(self, value: object) -> int | float:
        try:
            return Share().kept(value)
        except ValueError:
            return Size().kept(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few values."""

    values: tuple[object, ...]

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"

    def kept(self, value: object) -> Any:
        given = _text(value) if isinstance(value, str) else _whole(value)  # 16.0 is not 16, and True is not 1
        if given not in self.values:
            raise ValueError
        return given


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off."""

    @property
    def wanted(self) -> str:
        return "true or false"

    def kept(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is not empty, of a form if one is given."""

    wanted: str = "a text that is not empty"
    form: str = r"[^\0]+"

    def kept(self, value: object) -> str:
        text = _text(value)
        if not re.fullmatch(self.form, text):
            raise ValueError
        return text


@dataclass(frozen=True, slots=True)
class PathText:
    """A path that is not empty, as text or as `pathlib` has it. Kept as text."""

    wanted: str = "a path that is not empty"

    def kept(self, value: object) -> str:
        return Text().kept(os.fspath(value) if isinstance(value, os.PathLike) else value)


def _whole(value: object) -> int:
    """Any kind of integer as Python's own. Raises: ValueError: it is none, as True is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError
    return int(value)


def _real(value: object) -> float:
    """Any kind of real number as Python's own. Raises: ValueError: it is none, or beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError
    try:
        return float(value)
    except OverflowError:
        raise ValueError from None


def _text(value: object) -> str:
    """Any kind of text as Python's own. Raises: ValueError: it is none."""
    if not isinstance(value, str):
        raise ValueError
    return str.__str__(value)  # what an enumeration's member is, not what it is called


def _bytes_of(text: str) -> int:
    """Raises: ValueError: it is no size."""
    match = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None or (match[2] and unit == 1):  # half a byte is a forgotten unit
        raise ValueError
    return int(Fraction(match[1] + (match[2] or "")) * unit)  # exactly: 4.1GB as a float is a byte short


def shown(value: object) -> str:
    """A value as it may stand in a message: short, whatever was given."""
    try:
        text = repr(value)
    except Exception:  # Python writes no number of more than 4300 digits, and what others write is theirs
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else "what cannot be written"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
