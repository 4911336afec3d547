"""What is counted per adapter, under the labels that a table gives. Knows no metric by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from interleaf.server.label_table import LabelTable

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
        waits: seconds that sequences waited for their first seat, by what for, whether they had one in the end or not.
        waits_again: after they had lost a seat.
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
    waits: dict[str, float] = field(default_factory=dict)
    waits_again: dict[str, float] = field(default_factory=dict)

    def add(self, other: AdapterCounts) -> None:
        """Take in what another one has counted."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        add_up(self.waits, other.waits)
        add_up(self.waits_again, other.waits_again)


_NUMBERS = tuple(each.name for each in fields(AdapterCounts) if not each.name.startswith("waits"))


_NOTHING = AdapterCounts()


def add_up(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add sums by key to others."""
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


class AdapterLabels:
    """Counts per adapter under the labels of a table; all other adapters share `other`.

    What was counted under `other` stays there, and a label that comes back goes on where it was: no counter ever falls.
    """

    def __init__(self, table: LabelTable) -> None:
        self._table = table
        self._counts: dict[str, AdapterCounts] = {}  # of every label that ever was
        self._requests: Counter[str] = Counter()
        self.other = AdapterCounts()

    def add(self, adapter: str, counts: AdapterCounts) -> None:
        """Count one request of an adapter, or more of one that was counted."""
        self._requests[adapter] += counts.requests
        if adapter != OTHER and self._table.has(adapter, counts.requests, self._requests[adapter]):
            self._counts.setdefault(adapter, AdapterCounts()).add(counts)
        else:
            self.other.add(counts)

    def add_counts(self, label: str, counts: AdapterCounts) -> None:
        """Add what another process has counted under a label, `other` among them."""
        (self.other if label == OTHER else self._counts.setdefault(label, AdapterCounts())).add(counts)
        self._requests[label] += counts.requests

    def items(self) -> Iterator[tuple[str, AdapterCounts]]:
        """(label, counts) of those that have a label now, `other` last and only if it has any."""
        labels = self._table.labels()
        yield from ((label, counts) for label, counts in self._counts.items() if label in labels)
        if self.other != _NOTHING:
            yield OTHER, self.other

    def all_counts(self) -> dict[str, AdapterCounts]:
        """By every label that ever was, `other` among them."""
        return {**self._counts, OTHER: self.other}

    def by_label(self, values: Mapping[str, int]) -> dict[str, int]:
        """Values of adapters by label; those without one are summed."""
        labels = self._table.labels()
        found: dict[str, int] = {}
        for adapter, value in values.items():
            label = adapter if adapter in labels else OTHER
            found[label] = found.get(label, 0) + value
        return found
