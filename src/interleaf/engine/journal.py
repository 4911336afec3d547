"""The table of names, and a journal of its changes in a file, from which a new process knows it again."""

from __future__ import annotations

import json
from pathlib import Path

from interleaf.core import AdapterUid
from interleaf.errors import AdapterNameTaken, AdapterNotFound


class NameTable:
    """Names of adapters, in the order they were given, and where each adapter is read. Owned by one thread.

    A change is in the file before it is in the table. The file belongs to one run of the program, and need not survive
    the machine: it is not synced.

    Attributes:
        version: changes so far.
        uids: the adapters by their names.
        sources: of each adapter, the source that was seen to hold it last.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self.uids: dict[str, AdapterUid] = {}
        self.sources: dict[AdapterUid, str] = {}
        if path.exists():
            lines = path.read_text().split("\n")
            for line in lines[:-1]:  # what follows the last line's end was cut short by a kill
                self._apply(*json.loads(line))
            path.write_text("".join(f"{line}\n" for line in lines[:-1]))
        self._file = path.open("a")

    def check_free(self, name: str, uid: AdapterUid) -> None:
        """Raises: AdapterNameTaken: the name means another adapter."""
        present = self.uids.get(name)
        if present not in (None, uid):
            raise AdapterNameTaken(name, str(present))

    def publish(self, name: str, uid: AdapterUid, source: str) -> None:
        """Let a name mean an adapter."""
        self._change(name, uid, source)

    def withdraw(self, name: str) -> AdapterUid:
        """Take a name away. Returns: the adapter that it meant. Raises: AdapterNotFound."""
        uid = self.uids.get(name)
        if uid is None:
            raise AdapterNotFound(name)
        self._change(name, None, "")
        return uid

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _change(self, name: str, uid: AdapterUid | None, source: str) -> None:
        self._file.write(json.dumps([name, uid, source]) + "\n")
        self._file.flush()
        self._apply(name, uid, source)

    def _apply(self, name: str, uid: AdapterUid | None, source: str) -> None:
        self.version += 1
        if uid is not None:
            self.uids[name] = uid
            self.sources[uid] = source
            return
        gone = self.uids.pop(name)
        if gone not in self.uids.values():
            del self.sources[gone]
