"""Which adapter paths a stranger may name: those inside allowed folders once links are resolved. Reads no contents."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from interleaf.errors import AdapterRejected, ConfigError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DUMMY = "dummy:"
_MAX_PATH = 4096


class AdapterRoots:
    """Decides whether a path that came over the network may be read.

    Whoever can write inside a root could swap a link between this check and the reading: roots belong to the operator.

    Args:
        roots: the allowed folders; they must exist.
        base: where relative paths start, itself a root; None refuses them.
        allow_dummy: whether "dummy:..." recipes are accepted.

    Raises: ConfigError: a root is no folder.
    """

    def __init__(self, roots: Sequence[str], base: str | None = None, *, allow_dummy: bool = False) -> None:
        self._base = None if base is None else _root("adapters_dir", base)
        extra = [_root("allow_adapter_root", root) for root in roots]
        self._roots = ([] if self._base is None else [self._base]) + extra
        self._allow_dummy = allow_dummy

    def resolve(self, source: str) -> str:
        """The path to read for what a client named: absolute, free of links, inside a root.

        Outside the roots the answer is the same whether something lies there or not.

        Raises: AdapterRejected: with every reason.
        """
        if source.startswith(_DUMMY):
            if self._allow_dummy:
                return source
            raise AdapterRejected(_shown(source), ["random adapters are not allowed here (allow_dummy_adapters)"])
        problems = _lexical_problems(source)
        if not self._roots:
            problems.append("no folder is allowed here (adapters_dir, allow_adapter_root)")
        elif self._base is None and not source.startswith("/"):
            problems.append("a relative path needs adapters_dir, which is not set")
        if problems:
            raise AdapterRejected(_shown(source), problems)
        path = Path(source) if source.startswith("/") else Path(self._base or "/", source)
        try:
            resolved = Path(os.path.realpath(path))
            problems = self._problems_of(resolved)
        except (OSError, ValueError, RuntimeError) as error:
            problems = [f"the path cannot be resolved: {getattr(error, 'strerror', None) or error}"]
        if problems:
            raise AdapterRejected(_shown(source), problems)
        return str(resolved)

    def _problems_of(self, folder: Path) -> list[str]:
        if not self._holds(folder):
            return ["the path is outside the allowed folders once links are resolved"]
        if folder in self._roots:
            return ["the path is an allowed folder itself, not an adapter inside one"]
        if not folder.exists():
            return ["nothing is there"]
        if not folder.is_dir():
            return ["a folder is wanted, this is something else"]
        problems = []
        for entry in sorted(folder.iterdir()):
            target = Path(os.path.realpath(entry))
            if not self._holds(target):
                problems.append(f"{_shown(entry.name)} in it is a link to outside the allowed folders")
            elif target.exists() and not stat.S_ISREG(target.stat().st_mode) and not target.is_dir():
                problems.append(f"{_shown(entry.name)} in it is neither a file nor a folder")
        return problems

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


def _root(setting: str, folder: str) -> Path:
    path = Path(os.path.realpath(folder))
    if not path.is_dir():
        raise ConfigError(f"{setting} must be a folder that exists, got {folder!r}")
    if path == Path("/"):
        raise ConfigError(f"{setting} must not be the root of the file system")
    return path


def _lexical_problems(source: str) -> list[str]:
    """What is wrong with a path before the file system is asked."""
    problems = []
    if not source.strip():
        problems.append("the path is empty")
    if len(source) > _MAX_PATH:
        problems.append(f"the path has {len(source)} characters, at most {_MAX_PATH} are allowed")
    if any(ord(character) < 32 or ord(character) == 127 for character in source):
        problems.append("the path holds control characters")
    if not source.isprintable() and not problems:
        problems.append("the path holds characters that cannot be printed")
    if _SCHEME.match(source):
        problems.append("the path is a URL or has a scheme; only folders of this machine are read")
    if ".." in re.split(r"[/\\]", source):
        problems.append("the path holds '..'")
    if source.startswith("~"):
        problems.append("'~' is not expanded")
    return problems


def _shown(text: str) -> str:
    """A stranger's text as it may stand in a message or a log: printable, short."""
    return repr(text if len(text) <= 120 else text[:117] + "...")
