"""How attention is cut into programs: everything is computed once, never in more programs than there is room for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from interleaf.attention.paged_plan import MIN_PART_TOKENS, cut_chunks, cut_decode

spans = st.lists(st.tuples(st.integers(0, 5000), st.one_of(st.integers(1, 300), st.integers(1, 40000))), max_size=40)


def ints(values):
    return np.array(list(values), dtype=np.int32)


@given(spans, st.integers(1, 300), st.sampled_from([16, 32, 64]))
def test_parts_cover_each_row_once_within_their_bounds_and_merges_name_the_parts_of_cut_rows(rows, spare, block):
    first, stop = ints(f for f, _ in rows), ints(f + n for f, n in rows)
    seats = np.arange(len(rows), dtype=np.int32)[::-1]
    parts, merges = cut_decode(seats, first, stop, spare, block)

    assert len(parts) <= len(rows) + spare
    assert len(merges) <= spare
    lengths = parts[:, 3] - parts[:, 2]
    assert (lengths > 0).all()
    assert (np.diff(lengths) <= 0).all()
    found = {row: sorted(parts[parts[:, 0] == row].tolist(), key=lambda p: p[2]) for row in range(len(rows))}
    merged = {row: (at, count) for row, at, count, *_ in merges.tolist()}
    places = []
    for row, of_row in found.items():
        assert [p[2] for p in of_row] == [first[row], *(p[3] for p in of_row[:-1])]
        assert of_row[-1][3] == stop[row]
        assert all(p[1] == seats[row] for p in of_row)
        assert all((p[3] - p[2]) % block == 0 for p in of_row[:-1])
        if len(of_row) == 1:
            assert of_row[0][4] == 0
            assert row not in merged
        else:
            at, count = merged.pop(row)
            assert [p[4] for p in of_row] == list(range(at + 1, at + count + 1))
            places += range(at, at + count)
    assert not merged
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= 2 * spare


def test_one_long_row_fills_the_gpu_and_many_equal_ones_are_left_whole():
    parts, merges = cut_decode(ints([3]), ints([0]), ints([32768]), 64, 64)
    assert len(parts) == 64
    assert merges[0, :3].tolist() == [0, 0, 64]
    parts, merges = cut_decode(np.arange(256, dtype=np.int32), ints([0] * 256), ints([400] * 256), 66, 64)
    assert len(parts) == 256
    assert not len(merges)
    parts, _ = cut_decode(ints([0]), ints([0]), ints([MIN_PART_TOKENS]), 64, 64)
    assert len(parts) == 1


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 5000)), max_size=30), st.integers(1, 128))
def test_tiles_cover_each_row_of_each_chunk_once_the_longest_first(chunks, tile_rows):
    counts, before = ints(n for n, _ in chunks), ints(b for _, b in chunks)
    first_row = 7 + np.cumsum(counts, dtype=np.int32) - counts
    seats = np.arange(len(chunks), dtype=np.int32) + 50
    tiles = cut_chunks(seats, first_row, counts, before + counts, tile_rows)

    assert len(tiles) <= len(chunks) + counts.sum() // tile_rows
    assert (np.diff(tiles[:, 2] + tiles[:, 3]) <= 0).all()
    assert ((tiles[:, 2] > 0) & (tiles[:, 2] <= tile_rows)).all()
    rows = {row + i: (seat, at + i) for row, seat, count, at, *_ in tiles.tolist() for i in range(count)}
    expected = {
        row + i: (seat, b + i)
        for row, seat, n, b in zip(first_row.tolist(), seats.tolist(), counts.tolist(), before.tolist(), strict=True)
        for i in range(n)
    }
    assert tiles[:, 2].sum() == counts.sum()
    assert rows == expected
