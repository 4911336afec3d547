"""Launches with room for more: which of those that a graph may have captured takes a step. Knows schemes and costs.

A *mould* is a scheme with a number of records for each launch. A graph is captured for a mould and replayed for every
step that fits it, the records that are left over doing nothing. A step takes the cheapest mould that it fits, unless
one made for it would be cheaper by more than what a capture is worth. The more moulds there are, the more that is, and
the last of a bucket of rows takes everything: their number is bounded whatever the traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from interleaf.kernels.layouts import Longs
from interleaf.kernels.schemes import Demand, Floats, SchemeTable

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
_STANDS_IN = 2.0
"""Times what a step's LoRA would take that another mould's may."""


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
        room, fresh = _fresh(demand, table)
        scheme = int(fresh.argmin())
        if self._made:
            cost = self._costs(demand, table)
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

    def stand_in(self, demand: Demand, table: SchemeTable, may: Callable[[Mould], bool]) -> tuple[Mould, float] | None:
        """The cheapest of those that `may` says yes of, for a step that some mould has been chosen for.

        Returns: it, and the microseconds a layer that it takes more than the best one would; None if the step fits
            none of them, or would take far longer.
        """
        if not self._made:
            return None
        cost = self._costs(demand, table)
        least = float(_fresh(demand, table)[1].min())
        for i in cost.argsort().tolist():
            if cost[i] + demand.floor > _STANDS_IN * (least + demand.floor):
                return None
            if may(self._made[i]):
                return self._made[i], max(0.0, float(cost[i]) - least)
        return None

    def _costs(self, demand: Demand, table: SchemeTable) -> Floats:
        """Of a step in each mould; infinite in those that it does not fit."""
        spare = self._records - demand.records[self._schemes]
        return np.where((spare < 0).any((1, 2)), np.inf, demand.cost[self._schemes] + table.idle(spare))


def _fresh(demand: Demand, table: SchemeTable) -> tuple[Longs, Floats]:
    """Records of a mould that is made for a step, and what the step costs there, for each scheme."""
    room = _with_room(demand.records, table)
    return room, demand.cost + table.idle(room - demand.records)


def _with_room(records: Longs, table: SchemeTable) -> Longs:
    """At least one run of every layout: what no adapter of this step targets, one of the next may."""
    roomy = np.maximum(np.ceil(records * _ROOM).astype(np.int64), table.most)
    return np.asarray(np.minimum(roomy, table.most * table.bucket))
