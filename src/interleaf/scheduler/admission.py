"""How much room a sequence must find before it starts. Knows token counts, not who else runs."""

from __future__ import annotations

from typing import Protocol

from interleaf.scheduler.sequence import Sequence


class Admission(Protocol):
    """Says what must fit before a sequence takes a seat."""

    def tokens_to_fit(self, seq: Sequence) -> int:
        """Tokens of KV that must fit in free (or freeable) pages. At least the known tokens of the sequence."""


class Optimistic:
    """Start as soon as the known tokens and the next one fit; preemption covers what was misjudged."""

    def tokens_to_fit(self, seq: Sequence) -> int:
        return len(seq.token_ids) + 1
