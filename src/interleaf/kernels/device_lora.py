"""The LoRA work of each step on a GPU. Knows what is in the pool and what rows want; not when a graph is captured.

A step's records are made on the device: the host copies the rows and one task for each run of an adapter's rows and
launch, a few tens of KB, and the resolve kernel does the rest. What a graph reads stays where it is.

Source: S-LoRA (MLSys 2024) section 5.3; docs/adr/0010-image-order-per-device.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from interleaf.core import LoraGroup, PooledLayout
from interleaf.kernels.cuda import DeviceTables, PagedLaunch, Place, compiling, paged_layers
from interleaf.kernels.forms import all_pairs, choose_forms
from interleaf.kernels.launch_shapes import all_shapes, launch_shapes, widest
from interleaf.kernels.layouts import Field, Longs, Pair
from interleaf.kernels.moulds import Mould, Moulds
from interleaf.kernels.records import RECORD_INTS
from interleaf.kernels.reference import Scratch
from interleaf.kernels.residents import Residents, Segment, SingleRows
from interleaf.kernels.schemes import SchemeTable
from interleaf.kernels.step_tables import Staging, StepTable, StepTables, tasks_from
from interleaf.kernels.tasks import TASK_INTS, Members, RunBatch, make_tasks
from interleaf.kernels.work import LoraWork

_MAX_FAMILIES = 128
"""Kept; a bucket of rows has one, and each new kind of adapter makes others. The graphs of one that has left are not
found any more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class LoraStep:
    """The LoRA of one step.

    Attributes:
        key: steps of equal keys have the same `work`, whose launches and addresses do not depend on the step: a graph
            captured for one serves all. None for a step that is not for graphs.
        work: what `Transformer.forward` takes. Its launches do this step's work once `upload` has been called.
    """

    key: int | None
    work: LoraWork
    _book: DeviceLora
    _tables: StepTables
    _table: StepTable

    def upload(self) -> None:
        """Enqueue on the current stream, after all earlier steps, what makes `work` this step's: at most one copy.

        To be called before the book changes, outside of any capture, and with an ordinary kernel or a graph between it
        and the first LoRA launch (resolve.py says why).
        """
        self._book.fill(self._tables, self._table)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A mould's launches."""

    key: int
    work: LoraWork
    tables: StepTables
    starts: Longs


@dataclass(slots=True)
class _Family:
    """Moulds of one bucket of rows, and of layouts that are alike to the launches."""

    moulds: Moulds = field(default_factory=Moulds)
    casts: dict[Mould, _Cast] = field(default_factory=dict)


class DeviceLora:
    """All adapters in the pool of one GPU. One thread owns it; one stream computes.

    Args:
        num_layers, lane_elems: of the pool.
        max_rows: of a step that replays a graph.
        device: of the pool. (Without a GPU the kernels run under Triton's interpreter only.)
    """

    def __init__(self, *, num_layers: int, lane_elems: int, max_rows: int, device: torch.device | str) -> None:
        self._num_layers, self._lane_elems, self._max_rows = num_layers, lane_elems, max_rows
        self._device = torch.device(device)
        self._residents = Residents(num_layers, lane_elems, self._device)
        self._schemes: dict[int, SchemeTable] = {}
        self._families: OrderedDict[str, _Family] = OrderedDict()  # the least recently used first
        self._num_keys = 0
        self._staging = Staging(self._device, self._table_ints(max_rows, len(LoraGroup)))
        self._tables: StepTables | None = None
        self._latest: dict[bool, tuple[Sequence[Segment], LoraStep | None]] = {}
        self._latest_stand_in: tuple[Sequence[Segment], LoraStep, float] | None = None

    def add(self, uid: Hashable, layout: PooledLayout, pages: Sequence[int]) -> None:
        """An adapter lies in these pages, in the order of its stream, or will before a step that uses it computes.

        Enqueues a copy of their list on the current stream, which must be the one that computes.
        Raises: ValueError: the adapter is there already, or layout and pages contradict each other or the pool.
        """
        moved = self._residents.add(uid, layout, pages)
        self._forget_latest()
        if moved:
            self._families.clear()
            self._tables = None

    def remove(self, uid: Hashable) -> None:
        """The adapter's pages are somebody else's now. Steps whose `upload` was called are not affected.

        Raises: ValueError: it is not there.
        """
        self._residents.remove(uid)
        self._forget_latest()

    def plan(self, rows: Sequence[Segment], *, graph: bool) -> LoraStep | None:
        """What the rows of a step need from adapters; None if none has one.

        Args:
            rows: segments in the order of the batch; rows between them are base rows. `SingleRows` take less time.
            graph: the step replays a graph: its work is one of a few that serve many steps. Otherwise every launch is
                as large as the step needs.

        Raises: ValueError: segments overlap or go backwards, an adapter is not in the pool, or a step for a graph has
            more than `max_rows` rows.
        """
        segments = rows if isinstance(rows, SingleRows) else tuple(rows)
        latest = self._latest.get(graph)
        if latest is not None and latest[0] == segments:
            return latest[1]
        members, end = self._residents.members(segments)
        step = None
        if members is not None:
            if graph and end > self._max_rows:
                raise ValueError(f"a step for a graph must have at most {self._max_rows} rows, got {end}")
            step = self._in_mould(members, end) if graph else self._exact(members, end)
        self._latest[graph] = (segments, step)
        return step

    def stand_in(self, rows: Sequence[Segment], has_graph: Callable[[int], bool]) -> tuple[LoraStep, float] | None:
        """Other work for a step than `plan` gave for its graph: some that a graph has been captured with.

        Args:
            rows: those that `plan` was just asked for.
            has_graph: whether there is a graph for work of such a key.

        Returns: the step, and the seconds that it takes longer, as far as is known; None: no such work is fit for it.
            While the rows stay the same it stays the same, though better may have been captured meanwhile.
        """
        segments = rows if isinstance(rows, SingleRows) else tuple(rows)
        latest = self._latest_stand_in
        if latest is not None and latest[0] == segments and latest[1].key is not None and has_graph(latest[1].key):
            return latest[1:]
        members, end = self._residents.members(segments)
        if members is None:
            return None
        table, family = self._family(end)
        casts = family.casts
        found = family.moulds.stand_in(
            table.demand(members.layouts, members.counts), table, lambda m: m in casts and has_graph(casts[m].key)
        )
        if found is None:
            return None
        mould, extra_us = found
        step, extra_s = self._cast_step(members, table, mould, casts[mould]), extra_us * self._num_layers / 1e6
        self._latest_stand_in = segments, step, extra_s
        return step, extra_s

    def warm(self, pool: torch.Tensor) -> int:
        """Compile, or load from Triton's cache, every launch that any adapters may need.

        Runs each once on a record without rows. To be called while adapters of CUT_RANKS on all modules are known, as
        far as the pool can hold such.

        Args: pool: its dtype is that of all steps.
        Returns: how many there are; none without an adapter.
        """
        if not self._residents.has_layouts:
            return 0
        layouts = self._residents.layouts()
        zeros = torch.zeros(1, RECORD_INTS, dtype=torch.int32, device=self._device)
        v = torch.zeros(RECORD_INTS, dtype=torch.float32, device=self._device)
        tables = DeviceTables(records=zeros, rows=zeros.view(-1), pages=self._residents.pages, v=v)
        widest = layouts.fields(all_pairs(False)[0])[..., [Field.IN, Field.OUT]].max()
        row = torch.zeros(1, widest, dtype=pool.dtype, device=pool.device)
        shapes = all_shapes(layouts.fields)
        launches = [PagedLaunch(shape, self._residents.pool, tables, 0, 1) for shape in shapes]
        if pool.is_cuda:
            with compiling():
                for launch in launches:
                    launch.compile(row, row, pool)
        for launch in launches:
            launch.add(row, row, pool, 0)
        return len(launches)

    def fill(self, tables: StepTables, table: StepTable) -> None:
        """See LoraStep.upload."""
        tables.fill(table, self._staging, self._residents.pieces.data)

    def _forget_latest(self) -> None:
        self._latest.clear()
        self._latest_stand_in = None

    # --- steps for graphs

    def _in_mould(self, members: Members, end: int) -> LoraStep:
        table, family = self._family(end)
        mould = family.moulds.choose(table.demand(members.layouts, members.counts), table)
        cast = family.casts.get(mould)
        if cast is None:
            cast = family.casts[mould] = self._cast(mould, table)
        return self._cast_step(members, table, mould, cast)

    def _family(self, end: int) -> tuple[SchemeTable, _Family]:
        """Of steps of about so many rows, with the adapters that there are."""
        table = self._scheme_table(1 << (end - 1).bit_length())
        family = self._families.get(table.identity)
        if family is None:
            family = self._families[table.identity] = _Family()
        self._families.move_to_end(table.identity)
        if len(self._families) > _MAX_FAMILIES:
            self._families.popitem(last=False)
        return table, family

    def _cast_step(self, members: Members, table: SchemeTable, mould: Mould, cast: _Cast) -> LoraStep:
        pair = table.schemes[mould.scheme]
        everybody = np.arange(len(members.counts))
        batches = [RunBatch(expand, pair[expand].tokens, everybody) for expand in (False, True)]
        fields = self._fields(members, [(pair, everybody)])
        made = make_tasks(members, fields, batches, cast.starts, mould.records)
        return LoraStep(cast.key, cast.work, self, cast.tables, StepTable(members.rows, made.tasks))

    def _scheme_table(self, bucket: int) -> SchemeTable:
        layouts = self._residents.layouts()
        table = self._schemes.get(bucket)
        if table is None or table.layouts is not layouts:
            table = self._schemes[bucket] = SchemeTable(layouts, bucket)
        return table

    def _cast(self, mould: Mould, table: SchemeTable) -> _Cast:
        """A mould's launches, in tables with room for the largest of all moulds."""
        # A mould has room for as many rows as its bucket, which the last bucket has more of than any step.
        rows, places = 1 << (self._max_rows - 1).bit_length(), len(table.layouts.share)
        records = int(table.most.sum((1, 2)).max()) * rows
        tables = self._reserve(self._table_ints(rows, places), records, (table.v_stride + 3) * rows)
        ends = mould.records.cumsum().reshape(mould.records.shape)
        starts = ends - mould.records
        assert ends[-1, -1] <= len(tables.tables.records), f"{ends[-1, -1]} records in a table of {records}"
        of_place = []
        for p, (in_features, out_features) in enumerate(table.ends.tolist()):
            launches = [
                (shapes[p], int(starts[b, p]), int(mould.records[b, p]))
                for b, shapes in enumerate(table.shapes[mould.scheme])
            ]
            of_place.append(Place(launches, in_features, out_features))
        self._num_keys += 1
        return _Cast(self._num_keys, self._work(of_place, tables, 0), tables, starts)

    # --- steps of their own size

    def _exact(self, members: Members, end: int) -> LoraStep:
        layouts = self._residents.layouts()
        pairs = choose_forms(members.counts.tolist(), layouts.highest)
        who: dict[Pair, list[int]] = {}
        for i, pair in enumerate(pairs):
            who.setdefault(pair, []).append(i)
        fields = self._fields(members, [(pair, np.array(mine)) for pair, mine in who.items()])
        shapes = {pair: launch_shapes(layouts.fields(pair), pair) for pair in who}
        batches = []
        of_batch = []
        for expand in (False, True):
            for form in dict.fromkeys(pair[expand] for pair in who):
                mine = np.array([i for i, pair in enumerate(pairs) if pair[expand] is form])
                batches.append(RunBatch(expand, form.tokens, mine))
                of_batch.append([shapes[pair][expand] for pair in who if pair[expand] is form])
        made = make_tasks(members, fields, batches)
        ints = tasks_from(len(members.rows)) + made.tasks.size
        tables = self._reserve(ints, int(made.totals.sum()), made.v_elems)
        of_place = []
        for p, (in_features, out_features) in enumerate(fields[:, :, [Field.IN, Field.OUT]].max(0).tolist()):
            launches = [
                (widest([shapes_of[p] for shapes_of in some]), int(made.starts[b, p]), int(made.totals[b, p]))
                for b, some in enumerate(of_batch)
            ]
            of_place.append(Place(launches, in_features, out_features))
        work = self._work(of_place, tables, end)
        return LoraStep(None, work, self, tables, StepTable(members.rows, made.tasks))

    # --- both

    def _fields(self, members: Members, parts: Sequence[tuple[Pair, Longs]]) -> Longs:
        """[members, places, fields], from the forms that each part of the members has."""
        layouts = self._residents.layouts()
        if len(parts) == 1:
            return layouts.fields(parts[0][0])[members.layouts]
        made = np.empty((len(members.counts), len(layouts.share), len(Field)), dtype=np.int64)
        for pair, mine in parts:
            made[mine] = layouts.fields(pair)[members.layouts[mine]]
        return made

    def _reserve(self, ints: int, records: int, v_elems: int) -> StepTables:
        if self._tables is None:
            self._tables = StepTables(ints, records, v_elems, self._residents.pages, self._residents.pool)
        elif not self._tables.fits(ints, records, v_elems):
            self._tables = self._tables.grown(ints, records, v_elems)
        return self._tables

    def _table_ints(self, rows: int, places: int) -> int:
        """Of a step for a graph at most: a shrink and an expand of each row, and what is left over of each launch."""
        return tasks_from(rows) + TASK_INTS * places * 2 * (rows + 1)

    def _work(self, places: Sequence[Place], tables: StepTables, end: int) -> LoraWork:
        residents = self._residents
        layers = paged_layers(places, residents.layouts().layer_class, residents.pool, tables.tables)
        return LoraWork(end, self._num_layers, self._lane_elems, residents.last_page, self._device, layers, Scratch(0))
