"""Launches with room for more: which of those that a graph may have captured takes a step. Knows schemes and costs.

A *mould* is a scheme with a number of records for each launch. A graph is captured for a mould and replayed for every
step that fits it, the records that are left over doing nothing. A step takes the cheapest mould that it fits, unless
one made for it would be cheaper by more than what a capture is worth. The more moulds there are, the more that is, and
the last of a bucket of rows takes everything: their number is bounded whatever the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from interleaf.kernels.layouts import Longs
from interleaf.kernels.schemes import Demand, SchemeTable

MAX_MOULDS = 12
"""Of a bucket of rows."""

_ROOM = 1.125
"""How much more a mould takes than the step that it was made for."""
_WORTH = 0.03
"""Part of the time of a step's LoRA that must be gained."""
_RISE = 1.3
"""What that is multiplied with for each mould beyond the third."""
_LAST = 3
"""The scheme of the last mould: runs of up to eight rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Mould:
    """A scheme with room.

    Attributes:
        scheme: its number in the table of schemes.
        records: room for so many: [shrink and expand, places].
    """

    scheme: int
    records: Longs


class Moulds:
    """All moulds of one bucket of rows."""

    def __init__(self) -> None:
        self._made: list[Mould] = []
        self._schemes = np.zeros(0, dtype=np.int64)  # of each
        self._records: Longs = np.zeros(0, dtype=np.int64)  # likewise, stacked

    def choose(self, demand: Demand, table: SchemeTable) -> Mould:
        """The mould for a step; a new one if need be."""
        room = _with_room(demand.records, table)
        fresh = demand.cost + table.idle(room - demand.records)
        scheme = int(fresh.argmin())
        if self._made:
            spare = self._records - demand.records[self._schemes]
            cost = np.where((spare < 0).any((1, 2)), np.inf, demand.cost[self._schemes] + table.idle(spare))
            best = int(cost.argmin())
            worth = _WORTH * _RISE ** max(0, len(self._made) - 3) * (demand.floor + fresh[scheme])
            if len(self._made) == MAX_MOULDS or cost[best] <= fresh[scheme] + worth:
                return self._made[best]
        if len(self._made) == MAX_MOULDS - 1:
            mould = Mould(_LAST, table.most[_LAST] * table.bucket)
        else:
            mould = Mould(scheme, room[scheme])
        self._made.append(mould)
        self._schemes = np.array([m.scheme for m in self._made])
        self._records = np.stack([m.records for m in self._made])
        return mould


def _with_room(records: Longs, table: SchemeTable) -> Longs:
    """At least one run of every layout: what no adapter of this step targets, one of the next may."""
    roomy = np.maximum(np.ceil(records * _ROOM).astype(np.int64), table.most)
    return np.asarray(np.minimum(roomy, table.most * table.bucket))
