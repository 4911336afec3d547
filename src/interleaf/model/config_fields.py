"""Reads the fields of a config.json with their types, noting every problem. Knows no field by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class ConfigFields:
    """A configuration that notes what is wrong with it and goes on, so that all problems are told at once.

    Where a value is unusable a harmless one stands in: the spec built from it is never returned.
    """

    def __init__(self, config: Mapping[str, Any], within: str = "", problems: list[str] | None = None) -> None:
        self.config = config
        self._within = within
        self._unusable: set[str] = set()
        self.problems: list[str] = [] if problems is None else problems

    def refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def usable(self, *keys: str) -> bool:
        """Whether none of these has been found missing or malformed, so that they may be held against each other."""
        return self._unusable.isdisjoint(keys)

    def get(self, key: str) -> Any:
        return self.config.get(key)

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number >= `least`."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self._malformed(key, f"a whole number >= {least}", value)
        return 2

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number > 0."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self._malformed(key, "a number > 0", value)
        return 1.0

    def flag(self, key: str) -> bool:
        """True or false; absent and null are false."""
        value = self.get(key)
        if isinstance(value, bool) or value is None:
            return bool(value)
        self._malformed(key, "true or false", value)
        return False

    def section(self, key: str) -> ConfigFields:
        """An object inside; absent and null are empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._malformed(key, "an object", value)
            value = None
        return ConfigFields(value or {}, f"{self._within}{key}.", self.problems)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, or several, or none."""
        value = self.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            return tuple(ids)
        self._malformed(key, "a token id or a list of them", value)
        return ()

    def _malformed(self, key: str, limit: str, value: object) -> None:
        self._unusable.add(key)
        if value is None:
            self.refuse(f"{self._within}{key} is missing")
        else:
            self.refuse(f"{self._within}{key} must be {limit}, got {value!r}")
