"""Hands out page ids. No torch, no device: every rule here is testable in microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from interleaf.errors import OutOfPages


class OwnerKind(StrEnum):
    """What a page holds."""

    KV = "kv"
    PREFIX = "prefix"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class PageOwner:
    """Who holds a page: a sequence (KV), the prefix cache (KV that sequences share) or an adapter, by its key."""

    kind: OwnerKind
    key: str


class PageAllocator:
    """One free list for KV cache and adapters.

    Invariant: every page is free or has exactly one owner, and free + used = total (`check`).
    The page freed last is handed out first: its memory is the likeliest to be in a cache.

    Args:
        first_page: the pages are those from here on.
    """

    def __init__(self, num_pages: int, *, first_page: int = 0) -> None:
        self._first_page = first_page
        self._owner: list[PageOwner | None] = [None] * (first_page + num_pages)  # by page; those below are never owned
        self._free = list(range(first_page + num_pages - 1, first_page - 1, -1))
        self._used: Counter[OwnerKind] = Counter()
        self._peak: Counter[OwnerKind] = Counter()

    @property
    def num_pages(self) -> int:
        return len(self._owner) - self._first_page

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def num_used_pages(self, kind: OwnerKind) -> int:
        return self._used[kind]

    def num_peak_pages(self, kind: OwnerKind) -> int:
        """The most pages that were used for that at any one time."""
        return self._peak[kind]

    def alloc(self, count: int, owner: PageOwner) -> tuple[int, ...]:
        """`count` pages for `owner`: all of them, or none.

        Raises: OutOfPages: fewer are free; nothing has changed.
        """
        assert count > 0, count
        if count > len(self._free):
            raise OutOfPages(wanted=count, free=len(self._free))
        pages = tuple(reversed(self._free[-count:]))
        del self._free[-count:]
        for page in pages:
            self._owner[page] = owner
        self._count(owner.kind, count)
        return pages

    def free(self, pages: Iterable[int], owner: PageOwner) -> None:
        """Take pages back from their owner. A page of somebody else, or a free one, is a bug of ours."""
        for page in pages:
            assert self._owner[page] == owner, f"page {page} belongs to {self._owner[page]}, not to {owner}"
            self._owner[page] = None
            self._free.append(page)
            self._used[owner.kind] -= 1

    def hand_over(self, page: int, owner: PageOwner, new_owner: PageOwner) -> None:
        """A page and what it holds belong to somebody else from now on."""
        assert self._owner[page] == owner, f"page {page} belongs to {self._owner[page]}, not to {owner}"
        self._owner[page] = new_owner
        self._used[owner.kind] -= 1
        self._count(new_owner.kind, 1)

    def owner(self, page: int) -> PageOwner | None:
        """Who holds a page; None if it is free."""
        return self._owner[page]

    def _count(self, kind: OwnerKind, count: int) -> None:
        self._used[kind] += count
        self._peak[kind] = max(self._peak[kind], self._used[kind])

    def check(self) -> None:
        """Assert the invariant. Costs a walk over all pages: for idle moments and tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page stands twice in the free list"
        counted = Counter(owner.kind for owner in self._owner if owner is not None)
        assert all(self._owner[page] is None for page in free), "a free page has an owner"
        assert counted.total() + len(free) == self.num_pages, "a page is neither free nor owned"
        assert counted == +self._used, f"counted {counted}, accounted {self._used}"
