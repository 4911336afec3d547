"""A request between its acceptance and its terminal event, and what its end tells of its waits. Plans nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from interleaf.core import Request, RequestAborted, RequestFailed, RequestFinished, RequestWaits
from interleaf.scheduler.sequence import Sequence

Terminal = RequestFinished | RequestAborted | RequestFailed


@dataclass(slots=True)
class OpenRequest:
    """A request that has not had its terminal event.

    Attributes:
        sequences: as many as it asked for.
        num_open: of them, those that have not ended.
    """

    request: Request
    sequences: list[Sequence]
    num_open: int

    def with_waits(self, terminal: Terminal) -> Terminal:
        """The event that ends it, with what its sequences have waited for and no first token has told."""
        first: dict[str, float] = {}
        again: dict[str, float] = {}
        for seq in self.sequences:
            if seq.start is None:
                _add_up(first, seq.waits)
                continue
            if not seq.num_outputs:
                _add_up(first, seq.start.waits)
            _add_up(again, seq.waits)
        return replace(terminal, waits=RequestWaits(first, again)) if first or again else terminal


def _add_up(total: dict[str, float], waits: Mapping[str, float]) -> None:
    for reason, seconds in waits.items():
        total[reason] = total.get(reason, 0.0) + seconds
