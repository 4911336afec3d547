"""Collects everything that is wrong with one adapter, so that it is refused once and in full. Knows no rule itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MAX_NAMES = 4
_MAX_CHARS = 120


def shown(value: object) -> str:
    """A value from a stranger's file as it stands in a message: quoted, on one line, of bounded length."""
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


class Problems:
    """Problems in the order they were found; those of one kind that repeat per tensor become one sentence.

    `add` takes a whole sentence. `group` takes what is wrong and one name that it is wrong with; the sentence lists
    the first few names and how many more there are, so a folder with 10,000 stray tensors gives one readable line.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[str] | None] = {}

    def add(self, sentence: str) -> None:
        self._found.setdefault(sentence, None)

    def group(self, what: str, name: str) -> None:
        names = self._found.setdefault(what, [])
        assert names is not None, f"{what!r} is a whole sentence already"
        names.append(name)

    def group_all(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            self.group(what, name)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[str]:
        for what, names in self._found.items():
            if names is None:
                yield what
            else:
                more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
                yield f"{what}: {', '.join(names[:_MAX_NAMES])}{more}"
