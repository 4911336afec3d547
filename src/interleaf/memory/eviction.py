"""Which idle thing leaves the pool first. Knows values and order, not pages or tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Orders the things that could be dropped. The caller skips those that must stay."""

    def touch(self, key: K) -> None:
        """The thing was used just now; unknown keys are added."""

    def forget(self, key: K) -> None:
        """The thing is gone."""

    def candidates(self) -> Iterator[K]:
        """All known things, the one to drop first first."""


class Lru(Generic[K]):
    """Least recently used first: the plain baseline. Every operation but a walk is O(1)."""

    def __init__(self) -> None:
        self._order: dict[K, None] = {}

    def touch(self, key: K) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def forget(self, key: K) -> None:
        self._order.pop(key, None)

    def candidates(self) -> Iterator[K]:
        return iter(self._order)
