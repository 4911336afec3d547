"""KV pages that sequences with the same beginning share. Knows tokens and pages; not sequences, and no tensor.

A tree of pages for every (adapter, salt): a path from its root spells the tokens that the pages hold KV of, page by
page. What lies behind one root is never found from another, so nothing is shared across adapters, versions of an
adapter (a version is a uid of its own) or salts. Tokens are compared themselves, not their hashes.

    root ── [the system prompt's 1st page] ── [2nd] ──┬── [a question's page] ── ...
                                                      └── [another's] ── ...

Life of a page: `claim` makes it *pending*, written by the one sequence that computes it; `computed` opens it to
sequences of later steps; `release` by its last reader leaves it idle, to be evicted when pages are wanted.

Source: the radix tree of SGLang (NeurIPS 2024) section 3, on whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interleaf.core import AdapterUid
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import Evictable, Reclaimer

_UNPROVEN_USES = 0.1
"""Uses that a page is credited with before anybody has come back for it: most prompts are never seen again."""

_OWNER = PageOwner(OwnerKind.PREFIX, "prefixes")

Root = tuple[AdapterUid | None, str | None]
"""Adapter (None: the base model) and salt."""


class PrefixPage(Evictable):
    """One page of KV and where it hangs in its tree.

    Attributes:
        page: its id; meaningless in a root.
        parent: the page before it; None in a root, and once the page has left its tree.
        key: in a root, which one it is.
        users: sequences that read it, or write it while it is pending.
        was_found: a sequence has started on it that had not computed it.
        ready_step: the step that computes its last token; None while that is not planned.
    """

    __slots__ = ("cache", "children", "key", "page", "parent", "ready_step", "tokens", "users", "was_found")

    def __init__(
        self,
        cache: PrefixCache,
        parent: PrefixPage | None,
        tokens: tuple[int, ...] = (),
        page: int = 0,
        key: Root | None = None,
    ) -> None:
        super().__init__(OwnerKind.PREFIX, 1, depth=0 if parent is None else parent.depth + 1, uses=_UNPROVEN_USES)
        self.cache = cache
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: dict[tuple[int, ...], PrefixPage] = {}
        self.users = 0
        self.was_found = False
        self.ready_step: int | None = None
        if parent is not None and parent.key is None:
            # Never worth more than the page before it, without which it cannot be found.
            self.uses, self.stamp = min(_UNPROVEN_USES, parent.uses), parent.stamp

    def evict(self) -> None:
        """Leave, with everything that hangs on this page."""
        self.cache.evict(self)


@dataclass(slots=True)
class PrefixCounts:
    """Running totals, in tokens of started sequences: found in the cache, and computed."""

    hit_tokens: int = 0
    computed_tokens: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """The pages of all prefixes. Methods are called by the scheduler's thread.

    Invariant: every page of the cache is owned by it in the allocator, has as many users as sequences hold it, and is
    with the Reclaimer exactly when it has none. Who uses a page uses all pages before it.
    """

    def __init__(self, allocator: PageAllocator, reclaimer: Reclaimer, page_tokens: int) -> None:
        self._allocator = allocator
        self._reclaimer = reclaimer
        self._page_tokens = page_tokens
        self._roots: dict[Root, PrefixPage] = {}
        self._num_pages = 0
        self._num_used = 0
        self.counts = PrefixCounts()

    def __len__(self) -> int:
        """Pages held, used or idle."""
        return self._num_pages

    @property
    def num_used_pages(self) -> int:
        """Pages that sequences hold."""
        return self._num_used

    def find(self, root: Root, token_ids: Sequence[int], step: int) -> tuple[list[PrefixPage], bool]:
        """The longest known chain of full pages that a sequence starting in `step` can read.

        At least one token is left over: whoever starts must compute something to sample from.

        Returns: the chain, and whether it goes on in pages that are being computed: waiting would make it longer.
        """
        chain: list[PrefixPage] = []
        page = self._roots.get(root)
        size = self._page_tokens
        for first in range(0, len(token_ids) - size, size):
            if page is None:
                break
            page = page.children.get(tuple(token_ids[first : first + size]))
            if page is not None:
                if page.ready_step is None or page.ready_step >= step:
                    return chain, True
                chain.append(page)
        return chain, False

    def acquire(self, chain: Sequence[PrefixPage]) -> None:
        """These pages stay until `release` or `leave`."""
        for page in chain:
            if page.users == 0:
                self._reclaimer.discard(page)
                self._num_used += 1
            page.users += 1

    def claim(
        self, root: Root, chain: Sequence[PrefixPage], token_ids: Sequence[int], pages: Sequence[int], owner: PageOwner
    ) -> list[PrefixPage]:
        """A sequence starts: it reads `chain` and computes the rest of its tokens, whose full pages become pending.

        Args:
            chain: acquired for it.
            pages: of the sequence, from its first token; those after the chain belong to `owner`.

        Returns: the new pages, which the sequence uses and writes. Where a page is known already it ends.
        """
        for page in reversed(chain):  # so that, by recency too, a page is worth no more than the one before it
            self._reclaimer.policy.used(page)
            page.was_found = True
        parent = chain[-1] if chain else self._root(root)
        claimed = []
        for index, tokens in self._full_pages(token_ids, len(chain), len(token_ids)):
            if tokens in parent.children:
                break
            parent = self._insert(parent, tokens, pages[index], owner)
            parent.users = 1
            self._num_used += 1
            claimed.append(parent)
        self._forget_if_empty(root)
        return claimed

    def release(self, chain: Sequence[PrefixPage]) -> None:
        """Undo one `acquire`."""
        for page in reversed(chain):
            page.users -= 1
            if page.users:
                continue
            self._num_used -= 1
            if page.ready_step is None or page.parent is None:  # never computed, or its adapter is gone
                self._free(page)
            else:
                self._reclaimer.policy.released(page)
                self._reclaimer.add(page)

    def part(self, chain: Sequence[PrefixPage], owner: PageOwner) -> int:
        """A sequence leaves its seat and means to go on later: what nobody else has ever used is its own again.

        Returns: how many pages of the chain stay with the cache, released.
        """
        num_shared = len(chain)
        while num_shared:
            page = chain[num_shared - 1]
            if page.was_found or page.children or page.parent is None:
                break
            assert page.users == 1
            self._unhook(page)
            self._num_used -= 1
            self._allocator.hand_over(page.page, _OWNER, owner)
            num_shared -= 1
        self.release(chain[:num_shared])
        return num_shared

    @staticmethod
    def computed(pages: Iterable[PrefixPage], step: int) -> None:
        """A step that was just planned completes these pending pages."""
        for page in pages:
            page.ready_step = step

    def leave(
        self,
        root: Root,
        chain: Sequence[PrefixPage],
        token_ids: Sequence[int],
        num_computed: int,
        pages: Sequence[int],
        owner: PageOwner,
        step: int,
    ) -> list[int]:
        """A sequence gives up its pages: full ones that are computed stay in the cache.

        Args:
            chain: what `acquire` and `claim` gave it, the first `len(chain)` of its pages.
            num_computed: of `token_ids`, the tokens whose KV planned steps have written.
            step: the number of the next step.

        Returns: the pages that it still owns.
        """
        own = list(pages[len(chain) :])
        # A chain that is not computed to its end, or was cut off with its adapter, cannot be continued.
        if not chain or (chain[-1].ready_step is not None and chain[-1].parent is not None):
            own = self._adopt(
                chain[-1] if chain else self._root(root), len(chain), token_ids, num_computed, own, owner, step
            )
            self._forget_if_empty(root)
        self.release(chain)
        return own

    def drop(self, uid: AdapterUid) -> None:
        """An adapter is gone: idle pages of it are freed now, the others by those who use them."""
        for root in [root for root in self._roots if root[0] == uid]:
            for page in list(self._roots.pop(root).children.values()):
                self._cut(page)

    def evict(self, page: PrefixPage) -> None:
        """Free an idle page and all that hang on it, which are idle too."""
        for below in self._subtree(page):
            assert below.users == 0
            self._reclaimer.discard(below)
            self._free(below)
            self.counts.evicted_pages += 1

    def check(self) -> None:
        """Assert the invariant, save for who uses what. Costs a walk over all pages."""
        roots = self._roots.values()
        pages = [page for root in roots for child in root.children.values() for page in self._subtree(child)]
        assert len({page.page for page in pages}) == len(pages) <= self._num_pages
        for page in pages:
            assert self._allocator.owner(page.page) == _OWNER
            assert (page.users == 0) == (page.ticket is not None), "idle pages, and no others, may be evicted"
            assert all(child.users <= page.users for child in page.children.values() if page.ready_step is not None)

    def _adopt(
        self,
        parent: PrefixPage,
        first: int,
        token_ids: Sequence[int],
        num_computed: int,
        own: list[int],
        owner: PageOwner,
        step: int,
    ) -> list[int]:
        """Take in a sequence's full pages from number `first` on. Returns: those that were not taken."""
        adopted: list[PrefixPage] = []
        left: list[int] = []
        for index, tokens in self._full_pages(token_ids, first, num_computed):
            known = parent.children.get(tokens)
            if known is None:
                known = self._insert(parent, tokens, own[index - first], owner)
                known.ready_step = step - 1
                adopted.append(known)
            elif known.ready_step is None:
                break  # somebody computes the same now, and what hangs on his page may go with him
            else:
                left.append(own[index - first])
            parent = known
        for page in reversed(adopted):
            self._reclaimer.policy.released(page)
            self._reclaimer.add(page)
        return left + own[len(left) + len(adopted) :]

    def _full_pages(
        self, token_ids: Sequence[int], first: int, num_tokens: int
    ) -> Iterable[tuple[int, tuple[int, ...]]]:
        size = self._page_tokens
        for index in range(first, min(num_tokens, len(token_ids)) // size):
            yield index, tuple(token_ids[index * size : (index + 1) * size])

    def _root(self, root: Root) -> PrefixPage:
        page = self._roots.get(root)
        if page is None:
            page = self._roots[root] = PrefixPage(self, None, key=root)
        return page

    def _forget_if_empty(self, root: Root) -> None:
        page = self._roots.get(root)
        if page is not None and not page.children:
            del self._roots[root]

    def _insert(self, parent: PrefixPage, tokens: tuple[int, ...], page: int, owner: PageOwner) -> PrefixPage:
        self._allocator.hand_over(page, owner, _OWNER)
        child = parent.children[tokens] = PrefixPage(self, parent, tokens, page)
        self._num_pages += 1
        return child

    def _cut(self, page: PrefixPage) -> None:
        """Take a page and all that hang on it out of their tree."""
        for below in self._subtree(page):
            self._reclaimer.discard(below)
            if below.users == 0:
                self._free(below)
            else:
                below.parent = None
                below.children.clear()

    def _free(self, page: PrefixPage) -> None:
        self._unhook(page)
        self._allocator.free((page.page,), _OWNER)

    def _unhook(self, page: PrefixPage) -> None:
        """A page is not the cache's any more."""
        if page.parent is not None:
            page.parent.children.pop(page.tokens, None)
            if page.parent.key is not None:
                self._forget_if_empty(page.parent.key)
            page.parent = None
        self._num_pages -= 1

    def _subtree(self, page: PrefixPage) -> list[PrefixPage]:
        """A page and all below it, the deepest first."""
        found = [page]
        for above in found:
            found.extend(above.children.values())
        return found[::-1]
