"""The table of one step: its rows by adapter, and what the resolve kernel is to do. Knows no form and no launch.

Rows of an adapter are cut into runs, one for each program of a piece. A *batch* is a shrink or an expand of some
adapters' runs, of one form; it has one launch for each place (a group in a class of layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interleaf.kernels.layouts import Field, Longs
from interleaf.kernels.records import Ints

TASK_INTS = 8


@dataclass(frozen=True, slots=True)
class Members:
    """The adapters of a step, in any order; rows of the batch in the order of their adapters.

    Attributes:
        rows: the batch's rows, adapter after adapter: what a record's first row points into.
        layouts: number of each adapter's layout in the layout set.
        page_firsts: where each adapter's page list begins.
        counts, firsts: of its rows, in `rows`.
    """

    rows: Ints
    layouts: Longs
    page_firsts: Longs
    counts: Longs
    firsts: Longs


@dataclass(frozen=True, slots=True)
class RunBatch:
    """A shrink or an expand.

    Attributes:
        tokens: rows of a run at most.
        members: numbers of the adapters that take part.
    """

    expand: bool
    tokens: int
    members: Longs


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a step, and where its launches find their records.

    Attributes:
        tasks: [N, 8], as resolve.py reads them.
        starts, totals: first record and number of records of each batch and place.
        v_elems: elements of v.
    """

    tasks: Ints
    starts: Longs
    totals: Longs
    v_elems: int


def make_tasks(
    members: Members, fields: Longs, batches: Sequence[RunBatch], starts: Longs | None = None, caps: Longs | None = None
) -> Tasks:
    """Find every run's place in v and among the records.

    Args:
        fields: [members, places, fields].
        starts, caps: first record of each batch and place, and how many there must be, the last of them without rows;
            None: as many as needed, side by side.
    """
    places = fields.shape[1]
    # A row of v for each row of each adapter; adapters begin where four elements can be loaded at a time.
    strides = fields[:, :, Field.V_STRIDE]
    of_adapter = strides * members.counts[:, None] + 3 & ~3
    v_ends = of_adapter.cumsum(0)
    v_firsts = v_ends - of_adapter

    parts: list[Ints] = []
    totals = np.zeros((len(batches), places), dtype=np.int64)
    made_starts = np.zeros((len(batches), places), dtype=np.int64) if starts is None else starts
    used = 0
    for b, batch in enumerate(batches):
        run, earlier, counts = _runs(members.counts, batch)
        first, number = (Field.B_FIRST, Field.B_NUMBER) if batch.expand else (Field.A_FIRST, Field.A_NUMBER)
        of_run = fields[run]
        numbers = of_run[:, :, number]
        ends = numbers.cumsum(0)
        totals[b] = ends[-1]
        if starts is None:
            made_starts[b] = used + totals[b].cumsum() - totals[b]
            used += int(totals[b].sum())
        part = np.empty((len(run), places, TASK_INTS), dtype=np.int32)
        part[:, :, 0] = of_run[:, :, first]
        part[:, :, 1] = numbers
        part[:, :, 2] = members.page_firsts[run][:, None]
        part[:, :, 3] = v_firsts[run] + earlier[:, None] * of_run[:, :, Field.V_STRIDE]
        part[:, :, 4] = ends - numbers + made_starts[b]
        part[:, :, 5] = (members.firsts[run] + earlier)[:, None]
        part[:, :, 6] = counts[:, None]
        parts.append(part.reshape(-1, TASK_INTS))
    if caps is not None:
        fill = np.zeros((totals.size, TASK_INTS), dtype=np.int32)
        fill[:, 1] = (caps - totals).ravel()
        fill[:, 4] = (made_starts + totals).ravel()
        parts.append(fill)
    return Tasks(np.concatenate(parts), made_starts, totals, int(v_ends[-1].max()))


def _runs(counts: Longs, batch: RunBatch) -> tuple[Longs, Longs, Longs]:
    """Of each run: its adapter, rows of the adapter before it, and its rows."""
    mine = batch.members
    if batch.tokens >= counts[mine].max():
        return mine, np.zeros_like(mine), counts[mine]
    each = -(-counts[mine] // batch.tokens)
    run = mine.repeat(each)
    earlier = (np.arange(len(run)) - (each.cumsum() - each).repeat(each)) * batch.tokens
    return run, earlier, np.minimum(counts[run] - earlier, batch.tokens)
