"""Pages of sequences: whether there are enough, who gets them, and who takes them back. Knows no queue and no seat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from interleaf.adapters.residency import Residency
from interleaf.core import AdapterUid
from interleaf.memory.allocator import PageAllocator
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.kept import KeptPages
from interleaf.memory.prefix import PrefixCache
from interleaf.memory.regions import Room, SequenceRegion
from interleaf.memory.swap import SwapSpace
from interleaf.scheduler.admission import Admission
from interleaf.scheduler.sequence import Sequence, WaitReason


@dataclass(slots=True)
class ResumeCounts:
    """Preempted sequences that have a seat again, by how they came by what they had computed.

    Attributes:
        kept: all of it was in the pool still, or in the prefix cache.
        swapped: pages of it came back from host memory.
        recomputed: neither: some of it had to be computed again.
        recomputed_tokens: of all of them, tokens that had to be.
    """

    kept: int = 0
    swapped: int = 0
    recomputed: int = 0
    recomputed_tokens: int = 0


class SequencePages:
    """Gives pages to sequences and pins the adapters that they use; evicts what is idle for it.

    Args:
        prefixes: shares pages between sequences that begin alike; None: no two sequences share any.
        swap: host memory for what preempted sequences have computed.
        region: the pages of `allocator`, if no adapter may use them; None: adapters have theirs of it, too.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        allocator: PageAllocator,
        residency: Residency,
        admission: Admission,
        prefixes: PrefixCache | None,
        swap: SwapSpace,
        region: SequenceRegion | None = None,
    ) -> None:
        self._room: Room = region or residency
        self.shares_pool = region is None
        self._geometry = geometry
        self._allocator = allocator
        self._residency = residency
        self._admission = admission
        self._prefixes = prefixes
        self._swap = swap
        self.resumed = ResumeCounts()
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
            found, goes_on = self._prefixes.find(seq.root, seq.token_ids, step)
            if goes_on:
                return WaitReason.PREFIX
            self._prefixes.acquire(found)
            seq.prefix = found
        if seq.kept is not None and seq.kept.first > len(seq.prefix):
            seq.kept.drop()  # what it continues has left the prefix cache
        # Pinned first: the pages must not be those of its own adapter.
        if seq.adapter is not None:
            self._residency.pin(seq.adapter)
        if (is_alone or self._may_fit(seq, step)) and self._make_room(seq, overtakable):
            self._take(seq, step)
            return None
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)
        if self._prefixes is not None:
            self._prefixes.release(seq.prefix)
            seq.prefix = []
        return WaitReason.PAGES

    def grow(self, seq: Sequence, overtakable: Callable[[], Iterable[AdapterUid]]) -> tuple[int, ...] | None:
        """One more page for a sequence; None if there is none.

        Args:
            overtakable: see `Residency.make_room`; asked for only when no page is free.
        """
        if not self._allocator.num_free_pages and not self._room.make_room(1, overtakable()):
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
        self._allocator.free(own, seq.owner)
        self._left(seq)

    def set_aside(self, seq: Sequence, step: int) -> None:
        """A sequence loses its seat; what it has computed stays until its pages are wanted. Called as `leave` is."""
        num_computed = seq.num_computed(step)
        num_shared = 0 if self._prefixes is None else self._prefixes.part(seq.prefix, seq.owner)
        num_used = self._geometry.pages_for_tokens(num_computed)
        self._allocator.free(seq.pages[num_used:], seq.owner)
        seq.kept = KeptPages(
            self._allocator,
            self._room.reclaimer,
            self._swap,
            self._geometry.page_tokens,
            owner=seq.owner,
            first=num_shared,
            pages=seq.pages[num_shared:num_used],
            num_computed=num_computed,
            place=seq.order,
        )
        self._left(seq)

    def forget(self, seq: Sequence) -> None:
        """A sequence that waits will not go on."""
        if seq.kept is not None:
            seq.kept.drop()
            seq.kept = None

    def can_spare(self, num_pages: int, step: int) -> bool:
        """Whether the running sequences are expected to do without so many pages till they end, for an adapter."""
        if not self.shares_pool:
            return True
        return self._admission.fits(None, self._num_spare_pages - num_pages, step, self._geometry)

    def _left(self, seq: Sequence) -> None:
        seq.prefix = []
        seq.pages = []
        if seq.adapter is not None:
            self._residency.unpin(seq.adapter)
        self._admission.left(seq)
        self._num_left += 1

    def _make_room(self, seq: Sequence, overtakable: Iterable[AdapterUid]) -> bool:
        """Have the pages free that a sequence will need beside those it shares and those kept for it."""
        num_shared, kept = len(seq.prefix), seq.kept
        num_pages = self._geometry.pages_for_tokens(len(seq.token_ids) + 1) - num_shared
        if kept is None or not kept.num_pages:
            return self._room.make_room(num_pages, overtakable)
        num_pages -= max(0, kept.num_pages - num_shared + kept.first)
        spare = self._allocator.num_free_pages + self._room.reclaimer.num_idle_pages - kept.num_pages
        if num_pages > spare:  # alone it would wait for ever for what it holds twice
            spare += kept.give_up(num_shared)
        awaited = iter(overtakable)
        first = next(awaited, None)
        if num_pages > spare and first is None:
            return False  # before anything is moved: whoever is first in line asks in every plan
        kept.hold()
        if self._room.make_room(num_pages, awaited if first is None else chain((first,), awaited)):
            return True
        kept.let_go()
        return False

    def _take(self, seq: Sequence, step: int) -> None:
        page_tokens = self._geometry.page_tokens
        num_tokens = seq.num_known = len(seq.token_ids)
        num_shared = len(seq.prefix)
        seq.pages = [page.page for page in seq.prefix]
        seq.num_prefilled = num_shared * page_tokens
        slots = self._take_kept(seq, seq.kept) if seq.kept is not None else []
        num_held = len(seq.pages)
        if num_new := self._geometry.pages_for_tokens(num_tokens) - num_held:
            seq.pages += self._allocator.alloc(num_new, seq.owner)
        if slots:
            self._swap.copy_in(slots, seq.pages[num_held : num_held + len(slots)], seq.owner)
        if self._prefixes is not None:
            seq.prefix += self._prefixes.claim(seq.root, seq.prefix, seq.token_ids, seq.pages, seq.owner)
            self._prefixes.computed(seq.prefix[num_shared : seq.num_prefilled // page_tokens], step)
            self._prefixes.counts.hit_tokens += num_shared * page_tokens
            self._prefixes.counts.computed_tokens += num_tokens - seq.num_prefilled
        if seq.adapter is not None and seq.start is None:
            seq.load_s = self._residency.take_load_s(seq.adapter)
        self._admission.started(seq, step, self._geometry)

    def _take_kept(self, seq: Sequence, kept: KeptPages) -> list[int]:
        """A preempted sequence takes back what is left of its pages. Returns: the slots of those in host memory."""
        pages, slots = kept.take(len(seq.prefix))
        seq.kept = None
        seq.pages += pages
        seq.num_prefilled = max(seq.num_prefilled, kept.num_tokens)
        lost = kept.num_computed - seq.num_prefilled
        if slots:
            self.resumed.swapped += 1
        elif lost > 0:
            self.resumed.recomputed += 1
        else:
            self.resumed.kept += 1
        self.resumed.recomputed_tokens += max(0, lost)
        return slots

    def _may_fit(self, seq: Sequence, step: int) -> bool:
        """Whether the running sequences and this one are expected to find their pages till they end.

        A sequence that is refused is refused until somebody leaves or an adapter does: time alone frees no page.
        """
        room = self._num_spare_pages
        if self._refused == (seq, self._num_left, room):
            return False
        if self._admission.fits(seq, room, step, self._geometry):
            return True
        self._refused = (seq, self._num_left, room)
        return False

    @property
    def _num_spare_pages(self) -> int:
        """Pages for what sequences keep to themselves, if all that is idle were evicted."""
        shared = 0 if self._prefixes is None else self._prefixes.num_used_pages
        return self._allocator.num_pages - self._room.num_busy_pages - shared
