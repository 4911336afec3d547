"""Who sits where. Keeps the lists that a plan is made of, changed when somebody comes or goes, not rebuilt per step."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Row

from interleaf.scheduler.sequence import Sequence, SequenceState


class Seats:
    """The seated sequences: those whose prompt is being computed, those that decode, and those that drain.

    The lowest free seat is given first, so that the rows of a batch stay dense.

    Attributes:
        num_left: how often a seat has been given back.
    """

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._free = list(range(num_seats))
        self._vacated: list[int] = []
        self.num_left = 0
        self._prefilling: dict[int, Sequence] = {}
        self._decode_seats: list[int] = []  # ascending
        self._decoding: list[Sequence] = []  # in that order
        self._draining: dict[int, Sequence] = {}
        self._decode_rows: tuple[tuple[int, ...], tuple[Sequence, ...]] | None = None

    def __len__(self) -> int:
        return self.num_seats - len(self._free)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._prefilling.values()
        yield from self._decoding
        yield from self._draining.values()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def decode_rows(self) -> tuple[tuple[int, ...], tuple[Sequence, ...]]:
        """The decoding seats in order, and their sequences."""
        if self._decode_rows is None:
            self._decode_rows = tuple(self._decode_seats), tuple(self._decoding)
        return self._decode_rows

    @property
    def prefilling(self) -> Row[Sequence]:
        """The sequences whose prompt is not computed yet, in order of arrival."""
        if not self._prefilling:
            return ()
        return sorted(self._prefilling.values(), key=lambda seq: seq.order)

    def sit(self, seq: Sequence) -> None:
        """Take a seat, to compute the known tokens."""
        assert seq.state is SequenceState.WAITING
        seq.seat = heapq.heappop(self._free)
        seq.state = SequenceState.PREFILL
        self._prefilling[seq.seat] = seq

    def start_decoding(self, seq: Sequence) -> None:
        """The known tokens are planned: from the next step on one token at a time."""
        del self._prefilling[seq.seat]
        seq.state = SequenceState.DECODE
        at = bisect_left(self._decode_seats, seq.seat)
        self._decode_seats.insert(at, seq.seat)
        self._decoding.insert(at, seq)
        self._decode_rows = None

    def start_draining(self, seq: Sequence) -> None:
        """The last token is planned; the seat is kept until it is committed."""
        self._leave(seq)
        seq.state = SequenceState.DRAINING
        self._draining[seq.seat] = seq

    def leave(self, seq: Sequence, state: SequenceState) -> None:
        """Give the seat back; it can be taken again in the next plan, which vacates it first."""
        self._leave(seq)
        seq.state = state
        self.num_left += 1
        heapq.heappush(self._free, seq.seat)
        self._vacated.append(seq.seat)

    def take_vacated(self) -> tuple[int, ...]:
        """The seats given back since the last call."""
        if not self._vacated:
            return ()
        vacated, self._vacated = tuple(self._vacated), []
        return vacated

    def _leave(self, seq: Sequence) -> None:
        match seq.state:
            case SequenceState.PREFILL:
                del self._prefilling[seq.seat]
            case SequenceState.DECODE:
                at = bisect_left(self._decode_seats, seq.seat)
                assert self._decoding[at] is seq, f"sequence {seq.owner} is not the one in seat {seq.seat}"
                del self._decode_seats[at], self._decoding[at]
                self._decode_rows = None
            case SequenceState.DRAINING:
                del self._draining[seq.seat]
            case _:
                raise AssertionError(f"sequence {seq.owner} has no seat: {seq.state}")
