"""What is due at which step. Knows step numbers and who entered them, not what is to be done."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Calendar(Generic[T]):
    """Steps to come and what is due at each. Everything costs O(1) for what it names."""

    def __init__(self) -> None:
        self._due: dict[int, dict[T, None]] = {}

    def enter(self, step: int, item: T) -> None:
        """Something is due at a step."""
        self._due.setdefault(step, {})[item] = None

    def strike(self, step: int, item: T) -> None:
        """It is not due any more, if it was."""
        due = self._due.get(step)
        if due is not None and item in due:
            del due[item]
            if not due:
                del self._due[step]

    def take(self, step: int) -> list[T]:
        """What is due at a step, in the order that it was entered."""
        return list(self._due.pop(step, ()))
