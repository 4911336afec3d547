"""What launches are compiled for. Knows forms and what layouts ask of them; launches nothing.

Shapes come from all layouts in the pool and not from those of a step, so that few are met, and all of them can be
compiled before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interleaf.kernels.forms import Form
from interleaf.kernels.layouts import Field, Longs, Pair
from interleaf.kernels.records import rank_class


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """One program's code.

    Attributes:
        splits: of the columns of x at most, a power of two.
        highest: class of the highest rank.
        plain: whether all pieces are, where that is a matter of code.
    """

    form: Form
    expand: bool
    splits: int
    highest: int
    plain: bool


def launch_shapes(fields: Longs, pair: Pair) -> tuple[list[LaunchShape], list[LaunchShape]]:
    """Of the shrink and of the expand of each place. Args: fields: [layouts, places, fields]."""
    most = fields.max(0)
    shrink, expand = pair
    return (
        [LaunchShape(shrink, False, 1, 0, shrink.vector or not ragged) for ragged in most[:, Field.RAGGED_A].tolist()],
        [
            LaunchShape(
                expand,
                True,
                1 << max(0, splits - 1).bit_length(),
                rank_class(highest, expand.vector),
                expand.vector or not ragged,
            )
            for splits, highest, ragged in most[:, [Field.SPLITS, Field.HIGHEST, Field.RAGGED_B]].tolist()
        ],
    )


def widest(shapes: Sequence[LaunchShape]) -> LaunchShape:
    """What takes the records of all of them, which have one form."""
    return LaunchShape(
        shapes[0].form,
        shapes[0].expand,
        max(s.splits for s in shapes),
        max(s.highest for s in shapes),
        all(s.plain for s in shapes),
    )
