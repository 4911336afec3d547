"""How much of the pool the running sequences will need at once. Knows lengths and pages, not what holds the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from interleaf.core import AdapterUid
from interleaf.memory.geometry import PageGeometry
from interleaf.scheduler.sequence import Sequence


class Admission(Protocol):
    """Says what must fit before a sequence takes a seat."""

    def peak_pages(self, seated: Iterable[Sequence], candidate: Sequence | None, geometry: PageGeometry) -> int:
        """Most pages that these sequences will hold at any one time, beside those of the prefix cache.

        Args:
            candidate: the one that would start; None: those seated alone.
        """

    def ended(self, seq: Sequence) -> None:
        """A sequence has come to its own end; its length is known."""


class Optimistic:
    """Start as soon as the known tokens and the next one fit; preemption covers what was misjudged."""

    def peak_pages(self, seated: Iterable[Sequence], candidate: Sequence | None, geometry: PageGeometry) -> int:
        return 0

    def ended(self, seq: Sequence) -> None:
        pass


class Conservative:
    """Start only if prompt + max_tokens of everybody fits: nobody is ever preempted."""

    def peak_pages(self, seated: Iterable[Sequence], candidate: Sequence | None, geometry: PageGeometry) -> int:
        pages = sum(geometry.pages_for_tokens(seq.max_tokens) - len(seq.prefix) for seq in seated)
        return pages + (0 if candidate is None else geometry.pages_for_tokens(candidate.max_tokens))

    def ended(self, seq: Sequence) -> None:
        pass


@dataclass(slots=True)
class _Lengths:
    """Running mean and mean deviation of output lengths. Old ones count less and less (RFC 6298's estimator)."""

    mean: float
    deviation: float
    count: int = 0

    def add(self, length: int, memory: int) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, memory)
        self.deviation += weight * (abs(length - self.mean) - self.deviation)
        self.mean += weight * (length - self.mean)


class Estimated:
    """Start if the estimated peak fits; preemption covers what was misjudged.

    A sequence is expected to end at the mean output length of its adapter and one deviation; one that has passed that,
    a deviation later. What is known of an adapter is mixed with what is known of all, by the number of its ends. Pages
    peak just before some sequence ends: all that outlast it have grown by its remaining tokens (the estimate of
    Past-Future scheduling, ASPLOS 2025).

    Args:
        prior: output tokens expected before any sequence has ended.
    """

    _ADAPTER_MEMORY = 16
    _OVERALL_MEMORY = 256
    _PRIOR_WEIGHT = 4
    """Ends of an adapter that weigh as much as all that is known of the others."""

    def __init__(self, prior: int = 256) -> None:
        self._overall = _Lengths(float(prior), prior / 2)
        self._adapters: dict[AdapterUid | None, _Lengths] = {}

    def expected_outputs(self, seq: Sequence) -> int:
        """Output tokens that a sequence will have had when it ends."""
        most = seq.max_tokens - seq.prompt_tokens
        overall = self._overall
        mean, deviation = overall.mean, overall.deviation
        own = self._adapters.get(seq.adapter)
        if own is not None:
            count = min(own.count, self._ADAPTER_MEMORY)
            share = count / (count + self._PRIOR_WEIGHT)
            mean += share * (own.mean - mean)
            deviation += share * (own.deviation - deviation)
        expected = int(mean + deviation) + 1
        if expected <= seq.num_outputs:
            expected = seq.num_outputs + int(deviation) + 1
        return min(expected, most)

    def peak_pages(self, seated: Iterable[Sequence], candidate: Sequence | None, geometry: PageGeometry) -> int:
        page_tokens = geometry.page_tokens
        rows = []
        for seq in seated if candidate is None else (*seated, candidate):
            remaining = self.expected_outputs(seq) - seq.num_outputs
            rows.append((remaining, len(seq.token_ids) - len(seq.prefix) * page_tokens))
        rows.sort(reverse=True)
        peak = held = 0
        for count, (remaining, tokens) in enumerate(rows, start=1):
            held += tokens
            peak = max(peak, held + count * remaining + count * page_tokens // 2)  # half a page each is rounding
        return -(-peak // page_tokens)

    def ended(self, seq: Sequence) -> None:
        self._overall.add(seq.num_outputs, self._OVERALL_MEMORY)
        own = self._adapters.get(seq.adapter)
        if own is None:
            own = self._adapters[seq.adapter] = _Lengths(self._overall.mean, self._overall.deviation)
        own.add(seq.num_outputs, self._ADAPTER_MEMORY)
