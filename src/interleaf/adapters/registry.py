"""Names, the adapters behind them, and who refers to those. No torch, no files.

`acquire` is the only way to get an adapter: it looks a name up and takes a reference in one step, so that nothing can
be withdrawn in between. An adapter that has lost its last name and reference is reported through `on_unused`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Container

from interleaf.core import AdapterUid
from interleaf.errors import AdapterNameTaken, AdapterNotFound, AdapterRejected

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
"""The grammar of a name. `@` is kept for versions."""


class Registry:
    """The name table of one process. Thread-safe.

    Attributes:
        on_unused: called outside the lock with an adapter that nothing names or uses any more.
    """

    def __init__(self, on_unused: Callable[[AdapterUid], None] = lambda uid: None) -> None:
        self.on_unused = on_unused
        self._lock = threading.Lock()
        self._uids: dict[str, AdapterUid] = {}
        self._names: Counter[AdapterUid] = Counter()
        self._references: Counter[AdapterUid] = Counter()

    def __len__(self) -> int:
        return len(self._uids)

    def names(self) -> tuple[str, ...]:
        """All names, in the order they were published."""
        with self._lock:
            return tuple(self._uids)

    def has_name(self, name: str) -> bool:
        """Whether a name is taken."""
        with self._lock:
            return name in self._uids

    def first_names(self, uids: Container[AdapterUid]) -> dict[AdapterUid, str]:
        """The oldest name of each of some adapters that has one. Costs a walk over all names."""
        found: dict[AdapterUid, str] = {}
        with self._lock:
            for name, uid in self._uids.items():
                if uid in uids:
                    found.setdefault(uid, name)
        return found

    @staticmethod
    def check_name(name: str) -> None:
        """Raises: AdapterRejected: the name does not follow the grammar."""
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise AdapterRejected(
                repr(name),
                ["a name has 1 to 200 characters of A-Z a-z 0-9 . _ - and /, and starts with a letter or a digit"],
            )

    def publish(self, name: str, uid: AdapterUid) -> None:
        """Make an adapter visible. Publishing the same adapter again under its name changes nothing.

        Raises: AdapterRejected: the name is malformed.   AdapterNameTaken: it names another adapter.
        """
        self.check_name(name)
        with self._lock:
            present = self._uids.get(name)
            if present == uid:
                return
            if present is not None:
                raise AdapterNameTaken(name, present)
            self._uids[name] = uid
            self._names[uid] += 1

    def uid(self, name: str) -> AdapterUid:
        """The adapter behind a name, without a reference: to look at, not to use.

        Raises: AdapterNotFound.
        """
        with self._lock:
            return self._find(name)

    def knows(self, uid: AdapterUid) -> bool:
        """Whether a name or a reference holds an adapter."""
        with self._lock:
            return self._names.get(uid, 0) > 0 or self._references.get(uid, 0) > 0

    def acquire(self, name: str) -> AdapterUid:
        """The adapter behind a name, with a reference that keeps it until `release`.

        Raises: AdapterNotFound.
        """
        with self._lock:
            uid = self._find(name)
            self._references[uid] += 1
            return uid

    def release(self, uid: AdapterUid) -> None:
        """Give one reference back."""
        with self._lock:
            assert self._references[uid] > 0, uid
            self._references[uid] -= 1
            unused = self._forget_if_unused(uid)
        if unused:
            self.on_unused(uid)

    def withdraw(self, name: str) -> None:
        """Take a name away. Requests that hold the adapter keep it until they end.

        Raises: AdapterNotFound.
        """
        with self._lock:
            uid = self._find(name)
            del self._uids[name]
            self._names[uid] -= 1
            unused = self._forget_if_unused(uid)
        if unused:
            self.on_unused(uid)

    def _find(self, name: str) -> AdapterUid:
        try:
            return self._uids[name]
        except (KeyError, TypeError):
            raise AdapterNotFound(name) from None

    def _forget_if_unused(self, uid: AdapterUid) -> bool:
        if self._names.get(uid) or self._references.get(uid):
            return False
        self._names.pop(uid, None)
        self._references.pop(uid, None)
        return True
