"""What launches are compiled for. Knows forms and what layouts ask of them; launches nothing.

Shapes come from all layouts in the pool and not from those of a step, so that few are met; and there are so few that
all can be compiled before the first step, whatever adapters come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interleaf.core import STACK_ROWS
from interleaf.kernels.forms import Form, all_pairs
from interleaf.kernels.layouts import Field, Longs, Pair
from interleaf.kernels.records import RANK_CLASSES, rank_class


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


CUT_RANKS = (1, STACK_ROWS // 2 + 1)
"""Of two adapters on all modules, whose A are cut in all ways that there are: what counts is whether the rows of a
group's A, all modules together, are at most half of STACK_ROWS, and here all groups' are, and none's.
"""


def all_shapes(fields: Callable[[Pair], Longs]) -> set[LaunchShape]:
    """Everything that launches may be compiled for, whatever the ranks of each module.

    Args:
        fields: of layouts whose A are cut in as many ways as there are: all modules of each of CUT_RANKS.
    """
    found: set[LaunchShape] = set()
    for high in (False, True):
        for shrink, expand in all_pairs(high):
            highest = max(RANK_CLASSES) if high or expand.vector else STACK_ROWS
            classes = {rank_class(rank, expand.vector) for rank in RANK_CLASSES if rank <= highest}
            splits = {
                1 << max(0, n - 1).bit_length()
                for n in fields((shrink, expand))[..., Field.SPLITS].ravel().tolist()
                if n
            }
            for is_plain in (True, False):
                if is_plain or not shrink.vector:
                    found.add(LaunchShape(shrink, False, 1, 0, is_plain))
                if expand.vector:
                    plain_too = classes if is_plain else set()
                else:  # pieces of ranks above 64 are looked up, never plain
                    plain_too = classes - {RANK_CLASSES[-1]} if is_plain else classes
                found.update(LaunchShape(expand, True, n, c, is_plain) for n in splits for c in plain_too)
    return found


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
