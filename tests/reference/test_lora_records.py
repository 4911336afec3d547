"""The records of the paged kernels, carried out one by one in torch as their definition says, against float32 loops."""

import pytest
import torch

from interleaf.core import LoraGroup, Module
from interleaf.kernels import SingleRows
from tests.support.paged_lora import NAN, Pool, Widths, popularity, segments

WIDTHS = Widths(hidden=192, q=256, kv=64, mlp=2304)


def resolve(book, step):
    """Does what the resolve kernel is to do, from its definition."""
    at, records = book._residents, step._tables.tables.records.cpu()
    pieces, pages, pool = at.pieces.data.tolist(), at.pages.tolist(), at.pool
    step._tables.tables.rows[: len(step._table.rows)] = torch.from_numpy(step._table.rows)
    for source, number, pages_at, v_first, target, first_row, rows, _ in step._table.tasks.tolist():
        for n in range(number):
            record = [0] * 8
            if rows:
                tile, goes_on, cut, packed, _, v_at, column, last = pieces[source + n]
                lane, inside = divmod(tile, pool.lane_tiles)
                base = more = pages[pages_at + lane] * pool.page_tiles + inside
                if cut < 0:
                    base, more = tile, pages_at
                elif goes_on:
                    more = pages[pages_at + lane + 1] * pool.page_tiles - cut
                record = [base, more, cut, packed | rows, first_row, v_first + v_at, column, last]
            records[target + n] = torch.tensor(record)
    step._tables.tables.records.copy_(records)


class Machine:
    """Carries out launches, as records.py defines them."""

    def __init__(self, pool, book, step, layer):
        self.tiles = pool.data.cpu().view(-1, pool.tile)
        self.of, self.layer = book._residents.pool, layer
        self.rows, self.pages = step._table.rows.tolist(), book._residents.pages.tolist()

    def piece(self, base, more, cut, count):
        """Tiles of a piece."""
        lane = self.of.lane_tiles
        places = []
        for t in range(count):
            if cut < 0:
                at = base + t
                places.append(self.pages[more + at // lane] * self.of.page_tiles + at % lane)
            else:
                places.append((base if t < cut or cut == 0 else more) + t)
        return self.tiles[torch.tensor(places) + self.layer * lane]

    def run(self, launches, x, y):
        v = torch.full(launches[0]._tables.v.shape, NAN)
        for launch in launches:
            for base, more, cut, packed, first, v_at, column, last in launch._records.tolist():
                rows, middle, tiles = packed & 0xFF, packed >> 8 & 0xFF, packed >> 16
                if not rows:
                    continue
                height = last & 0xFFFF if launch.shape.expand else middle
                block = self.piece(base, more, cut, tiles * height).view(tiles, height, -1)
                matrix = block.transpose(0, 1).reshape(height, -1)
                columns = slice(column * self.of.tile, column * self.of.tile + matrix.shape[1])
                for m in range(rows):
                    row = self.rows[first + m]
                    if launch.shape.expand:
                        stack = last >> 16
                        low = sum(v[v_at + (m * middle + s) * stack :][:height] for s in range(middle))
                        y[row, columns] += low @ matrix
                    else:
                        v[v_at + m * last :][:height] = matrix @ x[row, columns]


def planned(pool, rows, graph):
    """A book of the adapters of the rows, and the step, resolved."""
    book = pool.book(max_rows=len(rows))
    for adapter in {id(a): a for a in rows if a}.values():
        book.add(id(adapter), adapter.layout, adapter.pages)
    step = book.plan(segments(rows), graph=graph)
    resolve(book, step)
    return book, step


def carry_out(pool, rows, layer, graph=False):
    book, step = planned(pool, rows, graph)
    groups = step.work.layers[layer]
    for group in LoraGroup:
        x, y, before = (z.cpu() for z in pool.inputs(group, len(rows)))
        if group in groups:
            Machine(pool, book, step, layer).run(groups[group].runs, x, y)
        want = pool.expected(rows, group, layer, x, before)
        torch.testing.assert_close(y, want, atol=2e-4, rtol=2e-4)
        for t, adapter in enumerate(rows):
            rest = ~pool.touched(adapter, group, layer)
            assert torch.equal(y[t, rest], before[t, rest])
    return groups


@pytest.mark.parametrize("shape", [(2, 2, 1, 2, 64), (2, 2, 64, 4, 64)], ids=["looked up", "resolved"])
@pytest.mark.parametrize("ranks", [[8], [1, 16], [3, 8, 64, 100]], ids=str)
@pytest.mark.parametrize("kind", ["identical", "distinct", "zipf", "some base"])
def test_records_mean_the_update(shape, ranks, kind):
    pool = Pool(WIDTHS, shape, 12000 if shape[2] == 1 else 80, 64)
    adapters = [pool.all_ranks(ranks[i % len(ranks)]) for i in range(4)]
    for num_rows in (1, 13, 70):
        rows = popularity(kind, adapters, num_rows, pool.random)
        if any(rows):
            carry_out(pool, rows, num_rows % 2, graph=num_rows == 13)


def test_only_groups_that_somebody_targets_are_launched():
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 80, 64)
    a, b = pool.all_ranks(8, (Module.V,)), pool.put([{Module.DOWN: 4, Module.Q: 6}, None])
    assert set(carry_out(pool, [a, b, None, b], 0)) == {LoraGroup.QKV, LoraGroup.DOWN}
    assert set(carry_out(pool, [a, b, None, b], 1)) == {LoraGroup.QKV}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("counts", [[1] * 9, [2] * 70, [1] * 5 + [3] * 5 + [30] * 5, [400] * 4], ids=str)
def test_every_row_is_shrunk_once_and_each_of_its_columns_expanded_once(counts, graph):
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 700, 64)
    adapters = [pool.all_ranks(4) for _ in counts]
    owners = [a for a, n in zip(adapters, counts, strict=True) for _ in range(n)]
    _, step = planned(pool, owners, graph)
    for group, runs in step.work.layers[0].items():
        for expand, width in ((False, WIDTHS.into(group)), (True, WIDTHS.columns(group))):
            done = torch.zeros(len(owners), width // pool.tile, dtype=torch.int32)
            for run in runs.runs:
                for r in run._records.tolist() if run.shape.expand is expand else ():
                    done[r[4] : r[4] + (r[3] & 0xFF), r[6] : r[6] + (r[3] >> 16)] += 1
            assert (done == 1).all()


@pytest.mark.parametrize("graph", [False, True])
def test_single_rows_are_planned_as_segments_of_one_row_each_are(graph):
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 80, 64)
    adapters = [pool.all_ranks(rank) for rank in (8, 16, 64)]
    rows = popularity("some base", adapters, 40, pool.random)
    uids = tuple(id(a) if a else None for a in rows)
    assert list(SingleRows(uids)) == segments(rows)
    assert SingleRows(uids)[1:3] == tuple(segments(rows)[1:3])
    steps = []
    for batch in (SingleRows(uids), segments(rows)):
        book = pool.book(max_rows=len(rows))
        for adapter in adapters:
            book.add(id(adapter), adapter.layout, adapter.pages)
        steps.append(book.plan(batch, graph=graph))
        assert book.plan(batch, graph=graph) is steps[-1]
        assert book.plan(SingleRows((None,) * 3), graph=graph) is None
        with pytest.raises(ValueError, match="adapter 5 is not in the pool"):
            book.plan(SingleRows((None, 5)), graph=graph)
    single, other = (step._table for step in steps)
    assert single.rows.tolist() == other.rows.tolist()
    assert single.tasks.tolist() == other.tasks.tolist()
