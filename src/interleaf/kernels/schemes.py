"""What a decode step's LoRA costs in one form or another. Knows forms and piece counts; no page, no launch.

In a captured graph forms and grids are fixed, so decode steps choose among a few *schemes*: a form of shrink and one of
expand for all adapters of the step, be their rows one or many. Any scheme takes any step; some are slow for it. (To
give singles and runs a form each takes twice the launches, which did not pay when that was decided: ADR 0014.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interleaf.core import STACK_ROWS
from interleaf.kernels.forms import (
    EXPAND_ONE,
    EXPAND_RUNS,
    EXPAND_RUNS_HIGH,
    SHRINK_FEW,
    SHRINK_LONG_HIGH,
    SHRINK_ONE,
    SHRINK_SOME,
    Form,
)
from interleaf.kernels.launch_shapes import launch_shapes
from interleaf.kernels.layouts import Field, LayoutSet, Longs, Pair

Floats = npt.NDArray[np.float64]

# Microseconds on an H200 beside the time that an adapter's bytes take once, fitted to docs/benchmarks/h200/kernels.md.
_LAUNCH_VECTOR, _LAUNCH_DOT = 1.2, 2.2
_PROGRAM_VECTOR, _PROGRAM_DOT = 0.0001, 0.0004
_IDLE = 0.0006
"""A program without rows."""
_PER_ELEM = 2 / 4.3e6
_AGAIN = 0.3
"""Part of the time of a first read that the same weights take for another run: they are in the L2 cache."""

_MANY_ADAPTERS = 64
"""Adapters from which on runs fill the GPU without a finer split of x."""
_TOKENS = (1, 2, 4, 8, 16, 64)


def schemes_of(bucket: int, high: bool) -> tuple[Pair, ...]:
    """All schemes of steps of up to `bucket` rows: single rows, runs of 2, 4, 8 and 16, and long ones of high ranks.

    Args:
        high: some rank is above STACK_ROWS.
    """
    expands = EXPAND_RUNS_HIGH if high else EXPAND_RUNS
    runs = [
        (SHRINK_FEW if bucket // tokens >= _MANY_ADAPTERS else SHRINK_SOME, expand)
        for tokens, expand in expands.items()
    ]
    long = ((SHRINK_LONG_HIGH, expands[16]),) if high else ()
    return ((SHRINK_ONE, EXPAND_ONE), *runs, *long)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step would take in each scheme.

    Attributes:
        records: [schemes, shrink and expand, places].
        cost: microseconds a layer beside the time that the adapters' bytes take, [schemes].
        floor: that time.
    """

    records: Longs
    cost: Floats
    floor: float


class SchemeTable:
    """Schemes of steps of up to `bucket` rows whose adapters have layouts of `layouts`.

    Attributes:
        most: records of a run at most, [schemes, shrink and expand, places].
        shapes: of each scheme, shrink and expand, and place.
        ends: widths of each place's input and output, [places, 2].
        v_stride: more than the elements of any row of v.
        identity: tables of equal identity can share moulds and launches.
    """

    def __init__(self, layouts: LayoutSet, bucket: int) -> None:
        self.layouts, self.bucket = layouts, bucket
        self.schemes = schemes_of(bucket, layouts.highest > STACK_ROWS)
        fields = np.stack([layouts.fields(pair) for pair in self.schemes])  # [schemes, layouts, places, fields]
        of_batch = fields.transpose(3, 0, 2, 1)
        self._pieces = np.stack([of_batch[Field.A_NUMBER], of_batch[Field.B_NUMBER]], axis=1)
        self.most: Longs = self._pieces.max(-1)
        self.shapes = [launch_shapes(layouts.fields(pair), pair) for pair in self.schemes]
        self.ends: Longs = fields[0][..., [Field.IN, Field.OUT]].max(0)
        self.v_stride = 1 << int(fields[..., Field.V_STRIDE].max()).bit_length()
        arrays = (a.tobytes() for a in (self.most, self.ends))
        self.identity = repr((bucket, layouts.layer_class, self.v_stride, self.shapes, *arrays))

        self._tokens = np.array([[_TOKENS.index(form.tokens) for form in pair] for pair in self.schemes])
        vector = np.array([pair[0].vector for pair in self.schemes])
        present = ((self.most > 0) @ layouts.share).sum(1)
        self._launches: Floats = np.where(vector, _LAUNCH_VECTOR, _LAUNCH_DOT) * present
        self._program = np.array([[_program(form) for form in pair] for pair in self.schemes])
        self._read = np.stack([fields[0][..., f] @ layouts.share for f in (Field.A_ELEMS, Field.B_ELEMS)]) * _PER_ELEM

    def demand(self, layouts: Longs, counts: Longs) -> Demand:
        """Of a step. Args: layout and rows of each adapter."""
        runs_of = -(-counts[:, None] // np.array(_TOKENS))
        kinds = len(self.layouts.layouts)
        if kinds == 1:
            adapters, by_tokens = np.array([len(counts)]), runs_of.sum(0)[:, None]
        else:
            adapters = np.bincount(layouts, minlength=kinds)
            order = layouts.argsort(kind="stable")
            ends = adapters.cumsum()
            sums = np.concatenate([np.zeros((1, len(_TOKENS)), np.int64), runs_of[order].cumsum(0)])
            by_tokens = (sums[ends] - sums[ends - adapters]).T
        runs = by_tokens[self._tokens]  # [schemes, shrink and expand, layouts]
        records = (self._pieces @ runs[..., None])[..., 0]
        cost = (
            self._launches
            + ((records @ self.layouts.share) * self._program).sum(1)
            + ((runs - adapters) * self._read).sum((1, 2)) * _AGAIN
        )
        return Demand(records, cost, float(adapters @ self._read.sum(0)))

    def idle(self, records: Longs) -> Floats:
        """What programs without rows cost: [..., shrink and expand, places] -> [...]."""
        return np.asarray((records @ self.layouts.share).sum(-1) * _IDLE)


def _program(form: Form) -> float:
    """Wider products take longer; so much that a form with room to spare loses to one that just fits."""
    return _PROGRAM_VECTOR if form.vector else _PROGRAM_DOT * (1 + form.tokens / 64)
