"""The records of the paged kernels, carried out one by one in torch as their definition says, against float32 loops."""

import pytest
import torch

from interleaf.core import LoraGroup, Module
from interleaf.kernels.records import AdapterRecords, StepRows
from tests.support.paged_lora import NAN, Pool, Widths, popularity

WIDTHS = Widths(hidden=192, q=256, kv=64, mlp=2304)


class Machine:
    """Carries out launches, as records.py defines them."""

    def __init__(self, pool, of, step, layer):
        self.tiles = pool.data.cpu().view(-1, pool.tile)
        self.of, self.layer = of, layer
        self.rows, self.pages = step.rows.tolist(), step.pages.tolist()

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
        v = torch.full((launches.v_elems,), NAN)
        for launch in launches.launches:
            for base, more, cut, packed, first, v_at, column, last in launch.records.tolist():
                rows, middle, tiles = packed & 0xFF, packed >> 8 & 0xFF, packed >> 16
                height = last & 0xFFFF if launch.expand else middle
                block = self.piece(base, more, cut, tiles * height).view(tiles, height, -1)
                matrix = block.transpose(0, 1).reshape(height, -1)
                columns = slice(column * self.of.tile, column * self.of.tile + matrix.shape[1])
                for m in range(rows):
                    row = self.rows[first + m]
                    if launch.expand:
                        stack = last >> 16
                        low = sum(v[v_at + (m * middle + s) * stack :][:height] for s in range(middle))
                        y[row, columns] += low @ matrix
                    else:
                        v[v_at + m * last :][:height] = matrix @ x[row, columns]


def carry_out(pool, rows, layer):
    of = {}
    for t, a in enumerate(rows):
        if a:
            of.setdefault(id(a), (a, []))[1].append(t)
    at = {"num_layers": pool.layers, "lane_elems": pool.lane_elems}
    records = [AdapterRecords(a.layout, a.pages, **at) for a, _ in of.values()]
    step = StepRows(records, [numbers for _, numbers in of.values()])
    groups = step.groups([a.layout.layer_layout[layer] for a, _ in of.values()])
    for group in LoraGroup:
        x, y, before = (z.cpu() for z in pool.inputs(group, len(rows)))
        if group in groups:
            Machine(pool, records[0], step, layer).run(groups[group], x, y)
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
            carry_out(pool, rows, num_rows % 2)


def test_only_groups_that_somebody_targets_are_launched():
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 80, 64)
    a, b = pool.all_ranks(8, (Module.V,)), pool.put([{Module.DOWN: 4, Module.Q: 6}, None])
    assert set(carry_out(pool, [a, b, None, b], 0)) == {LoraGroup.QKV, LoraGroup.DOWN}
    assert set(carry_out(pool, [a, b, None, b], 1)) == {LoraGroup.QKV}


@pytest.mark.parametrize("counts", [[1] * 9, [2] * 70, [1] * 5 + [3] * 5 + [30] * 5, [400] * 4], ids=str)
def test_every_row_is_shrunk_once_and_each_of_its_columns_expanded_once(counts):
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 700, 64)
    adapters = [pool.all_ranks(4) for _ in counts]
    owners = [a for a, n in zip(adapters, counts, strict=True) for _ in range(n)]
    records = [AdapterRecords(a.layout, a.pages, num_layers=2, lane_elems=pool.lane_elems) for a in adapters]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    step = StepRows(records, [range(f, f + n) for f, n in zip(firsts, counts, strict=True)])
    for group, launches in step.groups([0] * len(counts)).items():
        for expand, width in ((False, WIDTHS.into(group)), (True, WIDTHS.columns(group))):
            done = torch.zeros(len(owners), width // pool.tile, dtype=torch.int32)
            for launch in launches.launches:
                for r in launch.records.tolist() if launch.expand is expand else ():
                    done[r[4] : r[4] + (r[3] & 0xFF), r[6] : r[6] + (r[3] >> 16)] += 1
            assert (done == 1).all()


def test_images_of_another_order_and_pools_beyond_int32_tiles_are_refused():
    pool = Pool(WIDTHS, (2, 2, 64, 4, 64), 80, 64)
    layout = pool.all_ranks(4).layout
    pages = list(range(layout.pages))
    with pytest.raises(ValueError, match=r"beyond 2\^31 tiles"):
        AdapterRecords(layout, [*pages[:-1], 2**21], num_layers=2, lane_elems=pool.lane_elems)
    with pytest.raises(ValueError, match=r"100 elements is not made of tiles of 64"):
        AdapterRecords(layout, pages, num_layers=2, lane_elems=100)
