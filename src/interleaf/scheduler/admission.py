"""How much of the pool the running sequences will need at once. Knows lengths and pages, not what holds the rest."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from interleaf.core import AdapterUid
from interleaf.memory.geometry import PageGeometry
from interleaf.scheduler.sequence import Sequence


class Admission(Protocol):
    """Foresees the pages of those that run. The pages that a sequence shares, `Sequence.prefix`, are not its own."""

    def fits(self, candidate: Sequence | None, num_pages: int, step: int, geometry: PageGeometry) -> bool:
        """Whether the running sequences will never hold more than so many pages at a time from `step` on, if
        `candidate` joins them.
        """

    def started(self, seq: Sequence, step: int, geometry: PageGeometry) -> None:
        """A sequence has taken a seat."""

    def left(self, seq: Sequence) -> None:
        """A sequence has given its seat back."""

    def ended(self, seq: Sequence) -> None:
        """A sequence has come to its own end; its length is known."""

    def forget_adapter(self, uid: AdapterUid) -> None:
        """An adapter is gone, and no sequence uses it."""


class Optimistic:
    """Whoever finds pages for the tokens that are known may start; preemption covers what was misjudged."""

    def fits(self, candidate: Sequence | None, num_pages: int, step: int, geometry: PageGeometry) -> bool:
        return num_pages >= 0

    def started(self, seq: Sequence, step: int, geometry: PageGeometry) -> None:
        pass

    def left(self, seq: Sequence) -> None:
        pass

    def ended(self, seq: Sequence) -> None:
        pass

    def forget_adapter(self, uid: AdapterUid) -> None:
        pass


class Conservative:
    """Everybody is given room for prompt + max_tokens: nobody is ever preempted."""

    def __init__(self) -> None:
        self._reserved: dict[Sequence, int] = {}
        self._num_reserved = 0

    def fits(self, candidate: Sequence | None, num_pages: int, step: int, geometry: PageGeometry) -> bool:
        return self._num_reserved + (0 if candidate is None else self._most(candidate, geometry)) <= num_pages

    def started(self, seq: Sequence, step: int, geometry: PageGeometry) -> None:
        self._reserved[seq] = self._most(seq, geometry)
        self._num_reserved += self._reserved[seq]

    def left(self, seq: Sequence) -> None:
        self._num_reserved -= self._reserved.pop(seq)

    def ended(self, seq: Sequence) -> None:
        pass

    def forget_adapter(self, uid: AdapterUid) -> None:
        pass

    @staticmethod
    def _most(seq: Sequence, geometry: PageGeometry) -> int:
        return geometry.pages_for_tokens(seq.max_tokens) - len(seq.prefix)


class OutputLengths:
    """Running mean and mean deviation of output lengths, over all sequences and per adapter.

    Old ones count less and less, as in RFC 6298's estimator of round trips. What is known of an adapter is mixed with
    what is known of all, by the number of its ends.

    Args:
        prior: output tokens expected before any sequence has ended.
    """

    _ADAPTER_MEMORY = 16
    _OVERALL_MEMORY = 256
    _PRIOR_WEIGHT = 4
    """Ends of an adapter that weigh as much as all that is known of the others."""

    def __init__(self, prior: int) -> None:
        self._overall = _Running(float(prior), prior / 2)
        self._adapters: dict[AdapterUid | None, _Running] = {}

    def add(self, adapter: AdapterUid | None, num_outputs: int) -> None:
        """A sequence has ended after so many output tokens."""
        self._overall.add(num_outputs, self._OVERALL_MEMORY)
        own = self._adapters.get(adapter)
        if own is None:
            own = self._adapters[adapter] = _Running(self._overall.mean, self._overall.deviation)
        own.add(num_outputs, self._ADAPTER_MEMORY)

    def forget(self, adapter: AdapterUid) -> None:
        """An adapter is gone: what was known of it helps nobody."""
        self._adapters.pop(adapter, None)

    def expected(self, adapter: AdapterUid | None, num_outputs: int) -> int:
        """Output tokens that a sequence will end with which has had so many: more than those.

        The mean and one deviation; once that is passed, a deviation more.
        """
        mean, deviation = self._overall.mean, self._overall.deviation
        own = self._adapters.get(adapter)
        if own is not None:
            count = min(own.count, self._ADAPTER_MEMORY)
            share = count / (count + self._PRIOR_WEIGHT)
            mean += share * (own.mean - mean)
            deviation += share * (own.deviation - deviation)
        expected = int(mean + deviation) + 1
        return expected if expected > num_outputs else num_outputs + int(deviation) + 1


@dataclass(slots=True)
class _Running:
    mean: float
    deviation: float
    count: int = 0

    def add(self, value: int, memory: int) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, memory)
        self.deviation += weight * (abs(value - self.mean) - self.deviation)
        self.mean += weight * (value - self.mean)


class Estimated:
    """Room for the expected peak; preemption covers what was misjudged.

    Every sequence that runs grows by a token a step. One that is expected to end in step e, and holds t tokens of its
    own in step s, holds t - s + x in any step x up to e. Need peaks just before some sequence ends, so

        peak = max over k of   sum over all j with e_j >= e_k of (t_j - s_j + e_k)

    where t_j - s_j never changes: what is known is two lists that change when somebody comes or goes.

    To find the peak takes a walk over them, and in a pool with room for more nobody needs to know it: whoever joins
    adds no more to the peak than what it holds itself at its end, and whoever leaves adds nothing. So a bound is kept,
    and the peak is found anew where the bound does not do.

    Source: the future-memory estimate of Past-Future scheduling (ASPLOS 2025), kept incrementally.

    Args:
        prior: output tokens expected before any sequence has ended.
    """

    def __init__(self, prior: int = 256) -> None:
        self._lengths = OutputLengths(prior)
        self._rows: dict[Sequence, tuple[int, int]] = {}
        self._sorted: list[tuple[int, int, Sequence]] = []  # (e, order of arrival, sequence), ascending
        self._ends: list[int] = []  # e, in that order
        self._bases: list[int] = []  # t - s
        self._bound = 0  # tokens, half a page for each sequence among them

    def fits(self, candidate: Sequence | None, num_pages: int, step: int, geometry: PageGeometry) -> bool:
        half, most = geometry.page_tokens // 2, num_pages * geometry.page_tokens
        self._renew(step, half)
        if candidate is None:
            return self._bound <= most or self._find_peak(half) <= most
        end, base = self._row(candidate, step, geometry)
        return self._bound + end + base + half <= most or self._find_peak(half, end, base) <= most

    def _find_peak(self, half: int, end: int | None = None, base: int = 0) -> int:
        """The most tokens at a time; with one that joins, by its e and t - s. Sets the bound to that of those that run.

        Args:
            half: a page's, in tokens: the last page of each is half empty, on average.
        """
        ends, bases = np.array(self._ends, dtype=np.int64), np.array(self._bases, dtype=np.int64)
        needs = bases[::-1].cumsum()[::-1] + np.arange(len(ends), 0, -1) * (ends + half)  # just before each one ends
        peak = self._bound = int(needs.max(initial=0))
        if end is None:
            return peak
        earlier = bisect_left(self._ends, end)
        with_it = needs[:earlier] + ends[:earlier]
        later = len(ends) - earlier
        own = int(bases[earlier:].sum()) + base + (later + 1) * (end + half)
        return max(peak, own, int(with_it.max(initial=0)) + base + half)

    def started(self, seq: Sequence, step: int, geometry: PageGeometry) -> None:
        self._insert(seq, *self._row(seq, step, geometry), geometry.page_tokens // 2)

    def left(self, seq: Sequence) -> None:
        self._remove(bisect_left(self._sorted, self._rows[seq]))

    def ended(self, seq: Sequence) -> None:
        self._lengths.add(seq.adapter, seq.num_outputs)

    def forget_adapter(self, uid: AdapterUid) -> None:
        self._lengths.forget(uid)

    def _row(self, seq: Sequence, step: int, geometry: PageGeometry) -> tuple[int, int]:
        """(e, t - s) of a sequence, by what is known in a step."""
        expected = self._lengths.expected(seq.adapter, seq.num_outputs)
        remaining = min(expected, seq.max_tokens - seq.prompt_tokens) - seq.num_outputs
        return step + remaining, len(seq.token_ids) - len(seq.prefix) * geometry.page_tokens - step

    def _insert(self, seq: Sequence, end: int, base: int, half: int) -> None:
        row = self._rows[seq] = end, seq.order
        at = bisect_left(self._sorted, row)
        self._sorted.insert(at, (*row, seq))
        self._ends.insert(at, end)
        self._bases.insert(at, base)
        self._bound += base + end + half

    def _remove(self, at: int) -> tuple[Sequence, int]:
        """Returns: whose row it was, and its t - s."""
        _, _, seq = self._sorted.pop(at)
        del self._rows[seq], self._ends[at]
        return seq, self._bases.pop(at)

    def _renew(self, step: int, half: int) -> None:
        """Think again of those that should have ended and still run."""
        while self._ends and self._ends[0] <= step:
            seq, base = self._remove(0)
            expected = self._lengths.expected(seq.adapter, seq.num_outputs)
            remaining = max(1, min(expected, seq.max_tokens - seq.prompt_tokens) - seq.num_outputs)
            self._insert(seq, step + remaining, base, half)
