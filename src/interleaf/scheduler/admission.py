"""How much of the pool the running sequences will need at once. Knows lengths and pages, not what holds the rest."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from interleaf.core import AdapterUid
from interleaf.memory.geometry import PageGeometry
from interleaf.scheduler.sequence import Sequence


class Admission(Protocol):
    """Foresees the pages of those that run. The pages that a sequence shares, `Sequence.prefix`, are not its own."""

    def peak_pages(self, candidate: Sequence | None, step: int, geometry: PageGeometry) -> int:
        """Most pages that the running sequences will hold at any one time from `step` on, if `candidate` joins them."""

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

    def peak_pages(self, candidate: Sequence | None, step: int, geometry: PageGeometry) -> int:
        return 0

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

    def peak_pages(self, candidate: Sequence | None, step: int, geometry: PageGeometry) -> int:
        return self._num_reserved + (0 if candidate is None else self._most(candidate, geometry))

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

    where t_j - s_j never changes: two sorted arrays that change when somebody comes or goes hold all there is to know.

    Source: the future-memory estimate of Past-Future scheduling (ASPLOS 2025), kept incrementally.

    Args:
        prior: output tokens expected before any sequence has ended.
    """

    def __init__(self, prior: int = 256) -> None:
        self._lengths = OutputLengths(prior)
        self._rows: dict[Sequence, tuple[int, int]] = {}
        self._sorted: list[tuple[int, int, Sequence]] = []  # (e, order of arrival, sequence), ascending
        self._ends = _Ints()  # e, in that order
        self._bases = _Ints()  # t - s
        self._needs: tuple[int, NDArray[np.int64]] | None = None  # by whose end, for half a page

    def peak_pages(self, candidate: Sequence | None, step: int, geometry: PageGeometry) -> int:
        self._renew(step)
        half = geometry.page_tokens // 2  # the last page of each is half empty, on average
        needs = self._needs_of_those_that_run(half)
        peak = int(needs.max(initial=0))
        if candidate is not None:
            end, base = self._row(candidate, step, geometry)
            ends = self._ends.values
            earlier = int(ends.searchsorted(end))
            with_it = needs[:earlier] + ends[:earlier]
            peak = max(peak, int(with_it.max(initial=0)) + base + half)
            later = int(self._bases.values[earlier:].sum())
            peak = max(peak, later + base + (len(ends) - earlier + 1) * (end + half))
        return geometry.pages_for_tokens(peak)

    def _needs_of_those_that_run(self, half: int) -> NDArray[np.int64]:
        """Just before each one ends."""
        if self._needs is None or self._needs[0] != half:
            ends, bases = self._ends.values, self._bases.values
            counts = np.arange(len(ends), 0, -1)
            self._needs = half, bases[::-1].cumsum()[::-1] + counts * (ends + half)
        return self._needs[1]

    def started(self, seq: Sequence, step: int, geometry: PageGeometry) -> None:
        self._insert(seq, *self._row(seq, step, geometry))

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

    def _insert(self, seq: Sequence, end: int, base: int) -> None:
        row = self._rows[seq] = end, seq.order
        at = bisect_left(self._sorted, row)
        self._sorted.insert(at, (*row, seq))
        self._ends.insert(at, end)
        self._bases.insert(at, base)
        self._needs = None

    def _remove(self, at: int) -> tuple[Sequence, int]:
        """Returns: whose row it was, and its t - s."""
        _, _, seq = self._sorted.pop(at)
        del self._rows[seq]
        self._ends.pop(at)
        self._needs = None
        return seq, self._bases.pop(at)

    def _renew(self, step: int) -> None:
        """Think again of those that should have ended and still run."""
        while self._sorted and self._sorted[0][0] <= step:
            seq, base = self._remove(0)
            expected = self._lengths.expected(seq.adapter, seq.num_outputs)
            remaining = max(1, min(expected, seq.max_tokens - seq.prompt_tokens) - seq.num_outputs)
            self._insert(seq, step + remaining, base)


class _Ints:
    """A list of integers that is an array at any time."""

    def __init__(self) -> None:
        self._array: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._count = 0

    @property
    def values(self) -> NDArray[np.int64]:
        """A view, good until the next change."""
        return self._array[: self._count]

    def insert(self, at: int, value: int) -> None:
        if self._count == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[at + 1 : self._count + 1] = self._array[at : self._count]
        self._array[at] = value
        self._count += 1

    def pop(self, at: int) -> int:
        value = int(self._array[at])
        self._array[at : self._count - 1] = self._array[at + 1 : self._count]
        self._count -= 1
        return value
