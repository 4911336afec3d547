"""Makes a step's records on the device: pieces of layouts, put where an adapter's pages and rows are. Triton.

It is an ordinary launch: it begins when everything before it has ended, hence overwrites no record that a kernel of the
step before still reads; and an ordinary launch after it (an embedding, a graph) begins when it has ended. That is what
the LoRA kernels rely on, which read their records before they wait for the kernel before them: at least one kernel that
is launched without programmatic dependence, or the start of a graph, must lie between this kernel and them.
"""

import triton
import triton.language as tl


@triton.jit
def resolve(
    tasks,
    pieces,
    pages,
    records,
    LANE_TILES: tl.constexpr,
    PAGE_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Carry out one task: `number` pieces of one adapter become records for a few of its rows.

    A task is 8 ints: first piece, number, first entry in the page lists, v, first record, first row, rows. Pieces and
    records as in records.py. A task without rows fills its records with zeros, which do nothing.
    """
    task = tasks + tl.program_id(0) * 8
    source = tl.load(task)
    number = tl.load(task + 1)
    page_first = tl.load(task + 2)
    v_first = tl.load(task + 3)
    target = tl.load(task + 4)
    first_row = tl.load(task + 5)
    rows = tl.load(task + 6)
    for i in range(0, number, BLOCK):
        n = i + tl.arange(0, BLOCK)
        inside = n < number
        real = inside & (rows > 0)
        piece = pieces + (source + n) * 8
        tile = tl.load(piece, mask=real, other=0)
        goes_on = tl.load(piece + 1, mask=real, other=0) != 0
        cut = tl.load(piece + 2, mask=real, other=0)
        packed = tl.load(piece + 3, mask=real, other=0)
        v_at = tl.load(piece + 5, mask=real, other=0)
        column = tl.load(piece + 6, mask=real, other=0)
        last = tl.load(piece + 7, mask=real, other=0)

        looked_up = cut < 0
        lane = tile // LANE_TILES
        page = tl.load(pages + page_first + lane, mask=real & (cut >= 0), other=0)
        after = tl.load(pages + page_first + lane + 1, mask=real & goes_on, other=0)
        base = tl.where(looked_up, tile, page * PAGE_TILES + tile % LANE_TILES)
        more = tl.where(looked_up, page_first, tl.where(goes_on, after * PAGE_TILES - cut, base))

        record = records + (target + n) * 8
        tl.store(record, base, mask=inside)
        tl.store(record + 1, more, mask=inside)
        tl.store(record + 2, cut, mask=inside)
        tl.store(record + 3, packed | rows, mask=inside)
        tl.store(record + 4, tl.where(real, first_row, 0), mask=inside)
        tl.store(record + 5, tl.where(real, v_first, 0) + v_at, mask=inside)
        tl.store(record + 6, column, mask=inside)
        tl.store(record + 7, last, mask=inside)
