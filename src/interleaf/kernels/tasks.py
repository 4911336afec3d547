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

    runs = [_runs(members.counts, batch) for batch in batches]
    num_tasks = places * sum(len(run) for run, _, _ in runs)
    totals = np.zeros((len(batches), places), dtype=np.int64)
    made_starts = np.zeros((len(batches), places), dtype=np.int64) if starts is None else starts
    # By column until they are complete, so that each is written in one piece.
    columns = np.zeros((TASK_INTS, num_tasks + (0 if caps is None else totals.size)), dtype=np.int32)
    begin = used = 0
    for b, (batch, (run, earlier, counts)) in enumerate(zip(batches, runs, strict=True)):
        first, number = (Field.B_FIRST, Field.B_NUMBER) if batch.expand else (Field.A_FIRST, Field.A_NUMBER)
        numbers = fields[:, :, number].take(run, 0)
        ends = numbers.cumsum(0)
        totals[b] = ends[-1]
        if starts is None:
            made_starts[b] = used + totals[b].cumsum() - totals[b]
            used += int(totals[b].sum())
        of_batch = columns[:, begin : begin + numbers.size].reshape(TASK_INTS, *numbers.shape)
        begin += numbers.size
        of_batch[0] = fields[:, :, first].take(run, 0)
        of_batch[1] = numbers
        of_batch[2] = members.page_firsts[run][:, None]
        of_batch[3] = v_firsts.take(run, 0) + earlier[:, None] * strides.take(run, 0)
        of_batch[4] = ends - numbers + made_starts[b]
        of_batch[5] = (members.firsts[run] + earlier)[:, None]
        of_batch[6] = counts[:, None]
    if caps is not None:
        columns[1, begin:] = (caps - totals).ravel()
        columns[4, begin:] = (made_starts + totals).ravel()
    return Tasks(columns.T.copy(), made_starts, totals, int(v_ends[-1].max()))


def _runs(counts: Longs, batch: RunBatch) -> tuple[Longs, Longs, Longs]:
    """Of each run: its adapter, rows of the adapter before it, and its rows."""
    mine = batch.members
    if batch.tokens >= counts[mine].max():
        return mine, np.zeros_like(mine), counts[mine]
    each = -(-counts[mine] // batch.tokens)
    run = mine.repeat(each)
    earlier = (np.arange(len(run)) - (each.cumsum() - each).repeat(each)) * batch.tokens
    return run, earlier, np.minimum(counts[run] - earlier, batch.tokens)
