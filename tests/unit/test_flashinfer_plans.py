"""How long a plan may be, against FlashInfer's own allocations (0.6.11, PrefillPlan in attention/scheduler.cuh)."""

import random

import pytest

from interleaf.attention.flashinfer_plans import PLAN_BYTES, plan_bytes


def allocated(tiles: int, rows: int, seqs: int, *, graph: bool, split: bool) -> int:
    """Bytes from the first to the last of a plan's arrays, in the order in which FlashInfer allocates them."""
    arrays = [(4 * tiles, 16)] * 3 + [(4 * (seqs + 1), 16), (4, 1)]
    if graph:
        arrays.append((4, 16))
    if split:
        arrays += [(4 * (rows + 1), 16), (tiles, 16)]
    end = 0
    for size, alignment in arrays:
        end = -(-end // alignment) * alignment + size
    return end


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_plan_is_sent_whole_and_little_besides(graph, split):
    chance = random.Random(1)
    for _ in range(2000):
        tiles, rows, seqs = chance.randrange(1, 3000), chance.randrange(1, 9000), chance.randrange(1, 600)
        least = allocated(tiles, rows, seqs, graph=graph, split=split)
        told = plan_bytes([tiles, rows], seqs)
        assert least <= told <= allocated(tiles, rows, seqs, graph=True, split=True) + 256
        assert told % 16 == 0


def test_the_longest_step_s_plan_has_room():
    assert plan_bytes([8192 * 8, 8192], 2048) < PLAN_BYTES
