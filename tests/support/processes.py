"""What the kernel tells of processes: children, command lines, who runs. Any of them may end while it is asked."""

from __future__ import annotations

from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The children of a process that were started by its main thread; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command(pid: int) -> str:
    """The words of a process's command line between spaces; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
