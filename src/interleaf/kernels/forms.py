"""In what shapes LoRA work is cut into programs, and which suits a step. Knows counts of rows only.

A form is a shape and the launch that was fastest with it; figures, losers too, in docs/benchmarks/h200/kernels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interleaf.core import STACK_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A shape of programs. Compared by identity: there are few, and steps look many things up by them.

    Attributes:
        vector: sums in registers (mbgmv) rather than matrix products (mbgmm).
        tokens: rows of the batch that a program takes.
        columns: of A or B that a program takes of a block of 16 rows; of higher blocks of B fewer.
        step: columns of A, or rows of the batch of B, at a time.
    """

    vector: bool
    tokens: int
    columns: int
    step: int
    warps: int
    stages: int = 1

    def looks_up(self, tile: int, lane_tiles: int) -> bool:
        """Whether lanes are too short for pieces to meet one change of page at most."""
        return lane_tiles < STACK_ROWS * self.columns // tile


SHRINK_ONE = Form(True, 1, 1024, 1024, warps=4)
SHRINK_FEW = Form(False, 16, 2048, 256, warps=2, stages=4)
SHRINK_SOME = Form(False, 16, 1024, 256, warps=2, stages=4)
SHRINK_LONG_HIGH = Form(False, 64, 1024, 128, warps=4, stages=4)
SHRINK_PREFILL = Form(False, 64, 2048, 128, warps=4, stages=4)

EXPAND_ONE = Form(True, 1, 512, 1, warps=2)
EXPAND_RUNS = {
    2: Form(False, 2, 1024, 2, warps=8),
    4: Form(False, 4, 1024, 4, warps=8),
    8: Form(False, 8, 1024, 8, warps=8),
    16: Form(False, 16, 512, 16, warps=8),
}
EXPAND_RUNS_HIGH = {
    2: Form(False, 2, 1024, 2, warps=4),
    4: Form(False, 4, 512, 4, warps=1),
    8: Form(False, 8, 512, 8, warps=1),
    16: Form(False, 16, 512, 16, warps=1),
}
EXPAND_PREFILL = Form(False, 128, 512, 16, warps=8, stages=3)
EXPAND_PREFILL_HIGH = Form(False, 64, 512, 16, warps=2)
"""HIGH: some rank is above 16."""


def all_pairs(high: bool) -> list[tuple[Form, Form]]:
    """Every pair of shrink and expand that any step may have. Args: high: some rank is above STACK_ROWS."""
    runs = (EXPAND_RUNS_HIGH if high else EXPAND_RUNS).values()
    prefill = EXPAND_PREFILL_HIGH if high else EXPAND_PREFILL
    return [
        (SHRINK_ONE, EXPAND_ONE),
        *((shrink, expand) for shrink in (SHRINK_FEW, SHRINK_SOME) for expand in runs),
        *((SHRINK_LONG_HIGH, expand) for expand in runs if high),
        *((shrink, prefill) for shrink in (SHRINK_FEW, SHRINK_SOME, SHRINK_PREFILL)),
    ]


_LONG_ROWS = 25
"""Rows of an adapter from which on programs of 64 rows win in the shrink, of a prefill or of high ranks."""
_MANY_ADAPTERS = 64
"""Adapters of several rows from which on they fill the GPU without a finer split of x."""
_PREFILL_ROWS = 1024
"""Rows of all adapters from which on the rows fill the GPU."""
_SHARE = 8
"""A form of fewer than one in so many adapters does not pay its launch: they join the next wider one."""


def choose_forms(counts: Sequence[int], highest: int) -> list[tuple[Form, Form]]:
    """The forms of shrink and expand for each adapter of a step.

    Args:
        counts: rows of each adapter.
        highest: the highest rank of any.
    """
    adapters = len(counts)
    ones = counts.count(1)
    long = sum(n >= _LONG_ROWS for n in counts)
    short = adapters - ones - long
    high = highest > STACK_ROWS

    run_shrink = SHRINK_FEW if short + long >= _MANY_ADAPTERS else SHRINK_SOME
    if sum(counts) >= _PREFILL_ROWS:
        long_shrink = SHRINK_PREFILL
        run_expand = EXPAND_PREFILL_HIGH if high else EXPAND_PREFILL
    else:
        long_shrink = SHRINK_LONG_HIGH if high else run_shrink
        mean = (sum(counts) - ones) / max(1, adapters - ones)
        run_expand = (EXPAND_RUNS_HIGH if high else EXPAND_RUNS)[next((n for n in (2, 4, 8) if mean <= n), 16)]
    if long and short * _SHARE < adapters:
        run_shrink = long_shrink
    one_shrink, one_expand = (SHRINK_ONE, EXPAND_ONE) if ones * _SHARE >= adapters else (run_shrink, run_expand)
    return [
        (one_shrink, one_expand) if n == 1 else (long_shrink if n >= _LONG_ROWS else run_shrink, run_expand)
        for n in counts
    ]
