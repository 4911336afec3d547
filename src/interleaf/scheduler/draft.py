"""What a plan has gathered so far. Knows rows and seats, not why."""

from __future__ import annotations

from dataclasses import dataclass, field

from interleaf.core import AdapterLoad, Chunk, SeatGrow, SeatStart, SequenceStart
from interleaf.memory.prefix import PrefixCache
from interleaf.scheduler.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """A step that is being planned.

    Attributes:
        budget: rows that may still be added.
        sampling: the sequences of those chunks that end with their last known token.
    """

    step: int
    budget: int
    now_s: float
    page_tokens: int
    load: list[AdapterLoad] = field(default_factory=list)
    start: list[SeatStart] = field(default_factory=list)
    grow: list[SeatGrow] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)

    def add_chunk(self, seq: Sequence) -> None:
        """As many of a sequence's known tokens as are left to compute and fit in the budget."""
        count = min(self.budget, seq.num_known - seq.num_prefilled)
        if count == 0:
            return
        first, stop = seq.num_prefilled, seq.num_prefilled + count
        seq.num_prefilled = stop
        self.budget -= count
        samples = stop == seq.num_known
        self.chunks.append(Chunk(seq.seat, first, count, samples))
        if samples:
            self.sampling.append(seq)
        if seq.prefix:
            PrefixCache.computed(seq.prefix[first // self.page_tokens : stop // self.page_tokens], self.step)

    def add_start(self, seq: Sequence) -> None:
        """A sequence has taken a seat: all that a runner must know of it, and its first chunk."""
        if seq.start is None:
            waited_s = max(0.0, self.now_s - seq.request.arrival_s)
            seq.start = SequenceStart(waited_s, seq.num_prefilled, seq.found, seq.load_s, seq.waits)
            seq.waits = {}
        self.start.append(
            SeatStart(
                seat=seq.seat,
                adapter=seq.adapter,
                token_ids=tuple(seq.token_ids),
                prompt_tokens=seq.prompt_tokens,
                params=seq.request.params,
                seed=seq.seed,
                pages=tuple(seq.pages),
                stop_ids=tuple(sorted(seq.stop_ids)),
                num_cached=seq.num_prefilled,
            )
        )
        self.add_chunk(seq)
