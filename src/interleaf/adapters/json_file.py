"""JSON from a stranger: bounded, regular files only, every failure a sentence. Knows no schema."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from interleaf.adapters.problems import shown


class Unreadable(Exception):
    """A file cannot be used; the message is a sentence that names it."""


def regular_size(path: Path) -> int:
    """Bytes of a regular file, links followed.

    Raises: Unreadable: it is missing, a folder, a device or pipe (which could block for ever), or out of reach.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if path.is_symlink() else "is missing"
        raise Unreadable(f"{_name(path)} {what}") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{shown(path.name)} cannot be read: {_reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise Unreadable(f"{_name(path)} is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{_name(path)} is not a regular file")
    return status.st_size


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises: Unreadable: no regular file, over `max_bytes`, or its text is refused by `parse_object`.
    """
    size = regular_size(path)
    if size > max_bytes:
        raise Unreadable(f"{path.name} has {size} bytes, at most {max_bytes} are read")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {_reason(error)}") from None
    return parse_object(raw, path.name)


def parse_object(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `raw`; `name` says in messages where it came from.

    Raises: Unreadable: not UTF-8, not JSON, nested too deeply, not an object, or one key stands twice (which of the
        two values counts would depend on the reader).
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except Unreadable as error:
        raise Unreadable(f"{name}: {error}") from None
    except RecursionError:
        raise Unreadable(f"{name} is nested too deeply") from None
    except ValueError as error:  # JSON, UTF-8, and numbers of more digits than Python converts
        raise Unreadable(f"{name} is not valid JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{name} must hold a JSON object, got {shown(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Unreadable(f"key {shown(twice)} stands twice")
    return found


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def _name(path: Path) -> str:
    """A file's name for a message; a stranger's may hold control characters."""
    return path.name if path.name.isprintable() else shown(path.name)
