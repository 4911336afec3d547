"""Pages of sequences: whether there are enough, who gets them, and who takes them back. Knows no queue and no seat."""

from __future__ import annotations

from collections.abc import Iterable

from interleaf.adapters.residency import Residency
from interleaf.core import AdapterUid
from interleaf.memory.allocator import PageAllocator
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.prefix import PrefixCache
from interleaf.scheduler.admission import Admission
from interleaf.scheduler.sequence import Sequence, WaitReason


class SequencePages:
    """Gives pages to sequences and pins the adapters that they use; evicts what is idle for it.

    Args:
        prefixes: shares pages between sequences that begin alike; None: no two sequences share any.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        allocator: PageAllocator,
        residency: Residency,
        admission: Admission,
        prefixes: PrefixCache | None,
    ) -> None:
        self._geometry = geometry
        self._allocator = allocator
        self._residency = residency
        self._admission = admission
        self._prefixes = prefixes
        self._num_left = 0
        self._refused: tuple[Sequence, int, int] | None = None

    def start(
        self, seq: Sequence, step: int, overtakable: Iterable[AdapterUid], *, is_alone: bool
    ) -> WaitReason | None:
        """All that a sequence needs for its known tokens, whose adapter is in the pool.

        Args:
            overtakable: see `Residency.make_room`.
            is_alone: nobody runs: whatever is accepted can run by itself.

        Returns: why it has to wait; None: it may take a seat.
        """
        if self._prefixes is not None:
            chain, goes_on = self._prefixes.find(seq.root, seq.token_ids, step)
            if goes_on:
                return WaitReason.PREFIX
            self._prefixes.acquire(chain)
            seq.prefix = chain
        # Pinned first: the pages must not be those of its own adapter.
        if seq.adapter is not None:
            self._residency.pin(seq.adapter)
        num_pages = self._geometry.pages_for_tokens(len(seq.token_ids) + 1) - len(seq.prefix)
        if (is_alone or self._may_fit(seq, step)) and self._residency.make_room(num_pages, overtakable):
            self._take(seq, step)
            return None
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)
        if self._prefixes is not None:
            self._prefixes.release(seq.prefix)
            seq.prefix = []
        return WaitReason.PAGES

    def grow(self, seq: Sequence, overtakable: Iterable[AdapterUid]) -> tuple[int, ...] | None:
        """One more page for a sequence; None if there is none."""
        if not self._residency.make_room(1, overtakable):
            return None
        pages = self._allocator.alloc(1, seq.owner)
        seq.pages.extend(pages)
        return pages

    def leave(self, seq: Sequence, step: int) -> None:
        """A sequence gives everything back. Called while its state still says how far it has come."""
        own = seq.pages
        if self._prefixes is not None:
            own = self._prefixes.leave(
                seq.root, seq.prefix, seq.token_ids, seq.num_computed(step), seq.pages, seq.owner, step
            )
            seq.prefix = []
        self._allocator.free(own, seq.owner)
        seq.pages = []
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)
        self._admission.left(seq)
        self._num_left += 1

    def can_spare(self, num_pages: int, step: int) -> bool:
        """Whether the running sequences are expected to do without so many pages till they end."""
        return self._admission.peak_pages(None, step, self._geometry) <= self._num_spare_pages - num_pages

    def _take(self, seq: Sequence, step: int) -> None:
        num_tokens = seq.num_known = len(seq.token_ids)
        num_cached = seq.num_prefilled = len(seq.prefix) * self._geometry.page_tokens
        shared = [page.page for page in seq.prefix]
        own = self._allocator.alloc(self._geometry.pages_for_tokens(num_tokens) - len(shared), seq.owner)
        seq.pages = [*shared, *own]
        if self._prefixes is not None:
            seq.prefix += self._prefixes.claim(seq.root, seq.prefix, seq.token_ids, seq.pages, seq.owner)
            self._prefixes.counts.hit_tokens += num_cached
            self._prefixes.counts.computed_tokens += num_tokens - num_cached
        if seq.adapter is not None and seq.start is None:
            seq.load_s = self._residency.take_load_s(seq.adapter)
        self._admission.started(seq, step, self._geometry)

    def _may_fit(self, seq: Sequence, step: int) -> bool:
        """Whether the running sequences and this one are expected to find their pages till they end.

        A sequence that is refused is refused until somebody leaves or an adapter does: time alone frees no page.
        """
        room = self._num_spare_pages
        if self._refused == (seq, self._num_left, room):
            return False
        if self._admission.peak_pages(seq, step, self._geometry) <= room:
            return True
        self._refused = (seq, self._num_left, room)
        return False

    @property
    def _num_spare_pages(self) -> int:
        """Pages for what sequences keep to themselves, if all that is idle were evicted."""
        shared = 0 if self._prefixes is None else self._prefixes.num_used_pages
        return self._allocator.num_pages - self._residency.num_busy_pages - shared
