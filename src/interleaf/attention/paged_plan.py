"""How a step's attention is cut into programs, from lengths that the host knows. Numpy only: no torch, no device.

Records are eight int32 each, as interleaf.kernels.paged_attention reads them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

RECORD_INTS = 8

MIN_PART_TOKENS = 128
"""Shorter parts cost more in their merging than they gain."""


def cut_decode(
    seats: Int32s, first: Int32s, stop: Int32s, spare_parts: int, block_tokens: int
) -> tuple[Int32s, Int32s]:
    """Parts of decode rows, so that a few long sequences keep as many programs busy as many short ones.

    A row is cut when it is longer than 1 / `spare_parts` of all rows together: that bounds the number of parts by
    rows + spare_parts, those of cut rows by 2 * spare_parts, and the number of cut rows by spare_parts.

    Args:
        seats, first, stop: [N], of row i of the batch and the positions that it sees, [first, stop); none is empty.
        block_tokens: parts but a row's last are multiples of it.

    Returns:
        parts: [at most N + spare_parts, 8]: (row, seat, first, stop, place), longest first. place 0: the only part of
            its row; else 1 + its number among the parts of cut rows.
        merges: [at most spare_parts, 8]: (row, number of its first part, parts) of each cut row.
    """
    span = stop - first
    longest = max(MIN_PART_TOKENS, -(-int(span.sum(dtype=np.int64)) // spare_parts))
    longest = -(-longest // block_tokens) * block_tokens
    even = -(-span // -(-span // longest))
    even = -(-even // block_tokens) * block_tokens
    counts = -(-span // even)
    row = np.repeat(np.arange(len(span)), counts)
    ordinal = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_cut = counts > 1
    part_of_cut = is_cut[row]

    parts = np.zeros((len(row), RECORD_INTS), dtype=np.int32)
    parts[:, 0] = row
    parts[:, 1] = seats[row]
    parts[:, 2] = first[row] + ordinal * even[row]
    parts[:, 3] = np.minimum(parts[:, 2] + even[row], stop[row])
    parts[:, 4] = np.cumsum(part_of_cut) * part_of_cut

    merges = np.zeros((int(is_cut.sum()), RECORD_INTS), dtype=np.int32)
    merges[:, 0] = np.flatnonzero(is_cut)
    merges[:, 1] = np.cumsum(counts[is_cut]) - counts[is_cut]
    merges[:, 2] = counts[is_cut]
    return parts[np.argsort(parts[:, 2] - parts[:, 3], kind="stable")], merges


def cut_chunks(seats: Int32s, first_row: Int32s, counts: Int32s, kv_lens: Int32s, tile_rows: int) -> Int32s:
    """Tiles of chunks: (first row, seat, rows, position of the first row), those that see most first.

    Args:
        seats, first_row, counts, kv_lens: [N], of each chunk; its rows are the last `counts` of `kv_lens` tokens.
        tile_rows: rows of a tile at most.

    Returns: [at most N + sum(counts) // tile_rows, 8].
    """
    tiles_of = -(-counts // tile_rows)
    chunk = np.repeat(np.arange(len(counts)), tiles_of)
    skipped = (np.arange(len(chunk)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * tile_rows
    tiles = np.zeros((len(chunk), RECORD_INTS), dtype=np.int32)
    tiles[:, 0] = first_row[chunk] + skipped
    tiles[:, 1] = seats[chunk]
    tiles[:, 2] = np.minimum(counts[chunk] - skipped, tile_rows)
    tiles[:, 3] = kv_lens[chunk] - counts[chunk] + skipped
    return tiles[np.argsort(-(tiles[:, 2] + tiles[:, 3]), kind="stable")]
