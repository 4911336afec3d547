"""Which adapters have a label of their own, so many at most whoever counts. Knows requests by adapter, no other count.

Several API processes share one table, a file of the run's folder: so all count an adapter under the same label, and
what one of them tells for all has no more labels than one alone would have.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

_DECODER = msgspec.msgpack.Decoder(dict[str, int])


class LabelTable:
    """At most `capacity` adapters, with the requests that each has had.

    A label goes to whoever comes first. When all are given, an adapter takes the label of the least used one once this
    process has seen twice as many requests of it: rarely, because every label that ever was costs Prometheus a time
    series.

    Args:
        file: shared by all API processes of a server; None: this process has its own.
    """

    def __init__(self, capacity: int, file: Path | None = None) -> None:
        self._capacity = capacity
        self._file = file
        self._requests: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}  # requests that the file does not know yet
        self._version: tuple[int, int] | None = None  # of the file, as it was read

    def has(self, adapter: str, new: int, total: int) -> bool:
        """Whether an adapter has a label, or has earned one by now.

        Args:
            new: requests of it that the table does not know yet.   total: all that this process has seen.
        """
        self._read_if_changed()
        if adapter in self._requests:
            self._unwritten[adapter] = self._unwritten.get(adapter, 0) + new
            if self._file is None:
                self._add_unwritten()
            return True
        if not new or not self._may_have(total):
            return False
        with suppress(OSError), self._changing():  # a full disk costs a label, not the request
            if adapter not in self._requests and self._may_have(total):
                if len(self._requests) >= self._capacity:
                    del self._requests[min(self._requests, key=self._requests.__getitem__)]
                self._requests[adapter] = total
        return adapter in self._requests

    def labels(self) -> Mapping[str, int]:
        """The adapters that have one, with their requests."""
        self._read_if_changed()
        return self._requests

    def write(self) -> None:
        """Tell the other processes how often the labels were used. To be called now and then."""
        if self._unwritten:
            with suppress(OSError), self._changing():
                pass

    def _may_have(self, total: int) -> bool:
        if len(self._requests) < self._capacity:
            return True
        return self._capacity > 0 and total >= 2 * min(self._requests.values())

    def _add_unwritten(self) -> None:
        for adapter, count in self._unwritten.items():
            if adapter in self._requests:
                self._requests[adapter] += count
        self._unwritten.clear()

    # ------------------------------------------------------------------ the file

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The table as it is, for nobody else to change meanwhile. The kernel gives a dead process's lock back."""
        if self._file is None:
            yield
            return
        with open(self._file.with_suffix(".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read_if_changed()
            self._add_unwritten()
            before = dict(self._requests)
            yield
            try:
                new = self._file.with_suffix(".new")
                new.write_bytes(msgspec.msgpack.encode(self._requests))
                os.replace(new, self._file)
            except OSError:
                self._requests = before  # a label that nobody else knows is none
                raise
            self._version = _version(self._file)

    def _read_if_changed(self) -> None:
        if self._file is None:
            return
        version = _version(self._file)
        if version is None or version == self._version:
            return
        try:
            self._requests = _DECODER.decode(self._file.read_bytes())
        except OSError:
            return
        self._version = version


def _version(file: Path) -> tuple[int, int] | None:
    """Of a file that is only ever replaced."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
