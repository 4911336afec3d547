"""What is counted per adapter, under a limited number of labels. Knows no metric by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

OTHER = "other"
"""The label of all adapters that have none of their own. An adapter of this name is counted there, too."""


@dataclass(slots=True)
class AdapterCounts:
    """What one label's adapters have done, or one request of one of them.

    Attributes:
        first_tokens: requests that had one.   first_token_s: seconds from their arrivals.
        starts: sequences that had a seat and a token.   queue_s: seconds that they waited for the seat.
        hit, late, miss: those by how they found the adapter (AdapterFound).
        loads: those that were the first to use the adapter since it came to the pool.   load_s: seconds that this took.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    starts: int = 0
    queue_s: float = 0.0
    loads: int = 0
    load_s: float = 0.0
    hit: int = 0
    late: int = 0
    miss: int = 0

    def add(self, other: AdapterCounts) -> None:
        """Take in what another one has counted."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NUMBERS = tuple(each.name for each in fields(AdapterCounts))


@dataclass(slots=True)
class AdapterLabels:
    """Counts per adapter under at most `capacity` labels at a time; all other adapters share `other`.

    A label goes to whoever comes first. When all are given, an adapter takes the label of the least used one once it
    has twice as many requests: rarely, because every label that ever was costs Prometheus a time series. What was
    counted under `other` stays there, so no counter ever falls.
    """

    capacity: int
    other: AdapterCounts = field(default_factory=AdapterCounts)
    _labelled: dict[str, AdapterCounts] = field(default_factory=dict)
    _retired: dict[str, AdapterCounts] = field(default_factory=dict)
    _totals: Counter[str] = field(default_factory=Counter)

    def add(self, adapter: str, counts: AdapterCounts) -> None:
        """Count one request of an adapter."""
        self._totals[adapter] += counts.requests
        (self._labelled.get(adapter) or self._promote(adapter) or self.other).add(counts)

    def add_counts(self, label: str, counts: AdapterCounts) -> None:
        """Add what another process has counted under a label, `other` among them."""
        target = self._labelled.get(label)
        if target is None and label != OTHER and len(self._labelled) < self.capacity:
            target = self._labelled[label] = AdapterCounts()
        (target or self.other).add(counts)
        self._totals[label] += counts.requests

    def items(self) -> Iterator[tuple[str, AdapterCounts]]:
        """(label, counts), `other` last and only if it has any."""
        yield from self._labelled.items()
        if self.other.requests:
            yield OTHER, self.other

    def by_label(self, values: Mapping[str, int]) -> dict[str, int]:
        """Values of adapters by label; those without one are summed."""
        found: dict[str, int] = {}
        for adapter, value in values.items():
            label = adapter if adapter in self._labelled else OTHER
            found[label] = found.get(label, 0) + value
        return found

    def _promote(self, adapter: str) -> AdapterCounts | None:
        """A label for an adapter that has none, if one is free or the least used can be had."""
        if not self.capacity or adapter == OTHER:
            return None
        if len(self._labelled) >= self.capacity:
            least = min(self._labelled, key=self._totals.__getitem__)
            if self._totals[adapter] < 2 * self._totals[least]:
                return None
            self._retired[least] = self._labelled.pop(least)
        counts = self._labelled[adapter] = self._retired.pop(adapter, AdapterCounts())
        return counts
