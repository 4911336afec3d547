"""Chooses the next token of every seat on a GPU, and keeps what that takes there. Never waits for the device.

The rules are Sampler's: the same logits and seeds give the same tokens. What differs is where things are. Parameters
and the number of outputs of every seat lie in a table on the device, which the host changes when a sequence starts;
a step gives seat numbers, so that a captured graph serves any sequences.

    table of seats ──┐
    logits ──────────┴─> choose ──> token ids, last token of each seat, one output more      captured

    logits ──> copies of the rows that are penalised or may not end yet, edited ──> choose    not captured
       └─────> log-probabilities of the rows that ask                                         not captured
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from interleaf.core import SamplingParams, StepResult, TokenLogprobs
from interleaf.engine.device_penalties import DevicePenaltyBook, PenalisedRows
from interleaf.engine.logprobs import pack_logprobs, unpack_logprobs
from interleaf.engine.sampling_math import stream_key
from interleaf.engine.torch_choice import TorchChooser
from interleaf.kernels.token_choice import STATE_FIELDS, Choice, TokenChooser
from interleaf.kernels.uploads import Uploads

_EDITED_ROWS = 64
"""Rows edited at a time: 64 x 128256 float32 are 33 MB."""

Pinned = Callable[[int], torch.Tensor]
"""Gives so many bytes of host memory that copies of their own accord, as uint8."""


class SamplingKind(IntEnum):
    """How the rows of a batch are sampled; each but the last includes those before it."""

    GREEDY = Choice.GREEDY
    DRAWN = Choice.DRAWN
    FILTERED = Choice.FILTERED
    OUTSIDE = 3
    """Some row needs `sample_outside`."""


@dataclass(frozen=True, slots=True)
class PendingSample:
    """What `sample_outside` gave, still on the device.

    Attributes:
        token_ids: [N] int64.
        logprobs: what pack_logprobs gives for the rows that ask; None if there are none.
        rows, num_top: which rows ask, and for how many tokens.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    rows: tuple[int, ...]
    num_top: tuple[int, ...]

    def read_back(self, pinned: Pinned) -> Callable[[], StepResult]:
        """Enqueue the copies to the host. Returns: makes the result, once they have arrived."""
        tokens = _to_host(self.token_ids, pinned)
        packed = None if self.logprobs is None else _to_host(self.logprobs, pinned)

        def finish() -> StepResult:
            if packed is None:
                return StepResult(tuple(tokens.tolist()))
            entries: list[TokenLogprobs | None] = [None] * len(tokens)
            for row, entry in zip(self.rows, unpack_logprobs(packed, self.num_top), strict=True):
                entries[row] = entry
            return StepResult(tuple(tokens.tolist()), tuple(entries))

        return finish


def _to_host(tensor: torch.Tensor, pinned: Pinned) -> torch.Tensor:
    host = pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Rows that are sampled from edited copies.

    Attributes:
        seats: [E] int64.
        forbidden: (positions in the copies, token ids), or None.
    """

    rows: PenalisedRows
    seats: torch.Tensor
    forbidden: tuple[torch.Tensor, torch.Tensor] | None
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Outside:
    """Which rows of a batch need which stage, while `key` stays the same.

    Attributes:
        seats: [N] int64, edited rows replaced by the padding seat; None if no row is edited.
        choice: of the rows that are not edited; None if there are none.
        forbidding: seats that may not end yet.
        asking, num_top: rows that want log-probabilities.
    """

    key: tuple[int, bytes]
    seats: torch.Tensor | None
    choice: Choice | None
    edits: tuple[_Edit, ...]
    forbidding: tuple[int, ...]
    asking: torch.Tensor | None
    rows: tuple[int, ...]
    num_top: tuple[int, ...]


class DeviceSampler:
    """Sampling state of every seat, on one device. One host thread and one stream use it.

    Attributes:
        last_token: [num_seats + 1] int64 on the device, the token that each seat sampled last. The last row is that of
            the padding seat `num_seats`, which is greedy and whose tokens mean nothing.

    Args:
        max_rows: rows sampled at a time at most.
        kernels: use Triton's kernels; by default where the device is a GPU.
    """

    def __init__(
        self, num_seats: int, vocab_size: int, device: torch.device, max_rows: int, *, kernels: bool | None = None
    ) -> None:
        kernels = device.type == "cuda" if kernels is None else kernels
        self._num_seats = num_seats
        self._vocab_size = vocab_size
        self._device = device
        self._chooser = TokenChooser(vocab_size, device, max_rows) if kernels else TorchChooser()
        self._uploads = Uploads(device)
        self._penalties = DevicePenaltyBook(vocab_size, self._uploads, kernels=kernels)
        self._minus_infinity = torch.full((), -torch.inf, device=device)
        self.last_token = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)

        self._params: list[SamplingParams | None] = [None] * num_seats
        self._stop_ids: list[tuple[int, ...]] = [()] * num_seats
        self._choices = np.zeros(num_seats, dtype=np.int8)
        self._kinds = np.zeros(num_seats, dtype=np.int8)
        self._bound = np.zeros(num_seats, dtype=np.int64)  # outputs until the end tokens are allowed

        # A seat of zeros is greedy; so the padding seat's row, which is never written, is.
        self._state = torch.zeros(num_seats + 1, STATE_FIELDS, dtype=torch.int64, device=device)
        self._rows = np.zeros((num_seats, STATE_FIELDS), dtype=np.int64)
        self._changed: dict[int, None] = {}
        self._version = 0
        self._outside: _Outside | None = None

    @staticmethod
    def most_bytes(num_seats: int, vocab_size: int, max_rows: int) -> int:
        """Device memory that can be in use when every seat asks for everything."""
        edited = min(_EDITED_ROWS, num_seats) * vocab_size * 4
        described = min(_EDITED_ROWS, num_seats) * vocab_size * (4 + 4 + 8 + 8 + 8)
        return TokenChooser.num_bytes(vocab_size, max_rows) + 2 * num_seats * vocab_size * 2 + edited + described

    def start(
        self,
        seat: int,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        prompt_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        """A sequence takes a free seat, from the next `flush` on. Args: as Sampler.start."""
        assert self._params[seat] is None, f"seat {seat} is taken"
        outputs = len(token_ids) - prompt_tokens
        self._params[seat] = params
        self._stop_ids[seat] = tuple(t for t in stop_ids if t < self._vocab_size)
        self._bound[seat] = max(0, params.min_tokens - outputs) if self._stop_ids[seat] else 0
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        if params.temperature == 0.0:
            self._choices[seat] = Choice.GREEDY
        elif top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
            self._choices[seat] = Choice.FILTERED
        else:
            self._choices[seat] = Choice.DRAWN
        self._kinds[seat] = self._kind_of(seat, params)
        reals = np.array([params.temperature, params.top_p, params.min_p], dtype=np.float64)
        self._rows[seat] = stream_key(seed), outputs, top_k, *reals.view(np.int64).tolist()
        self._changed[seat] = None
        if params.has_penalties:
            self._penalties.open(seat, params, token_ids, prompt_tokens)
        self._version += 1

    def vacate(self, seat: int) -> None:
        """The sequence leaves its seat."""
        assert self._params[seat] is not None, f"seat {seat} is free"
        self._params[seat] = None
        self._penalties.close(seat)
        self._version += 1

    def kind(self, seats: Sequence[int] | np.ndarray) -> SamplingKind:
        """How a batch of these seats must be sampled."""
        return SamplingKind(int(self._kinds[np.asarray(seats, dtype=np.int64)].max(initial=0)))

    def flush(self) -> None:
        """Enqueue what `start` has changed since the last call; before the step that samples those seats."""
        if not self._changed:
            return
        seats = np.array(list(self._changed), dtype=np.int64)
        self._changed.clear()
        arrived = self._uploads.new(np.concatenate([seats[:, None], self._rows[seats]], axis=1))
        self._state.index_copy_(0, arrived[:, 0], arrived[:, 1:])

    def choose(self, logits: torch.Tensor, seats: torch.Tensor, kind: SamplingKind) -> torch.Tensor:
        """Choose one token for each row, count it as its seat's next output and make it the seat's last token.

        Device work only: may be captured, for any seats of that kind.

        Args:
            logits: [N, V], any float dtype.   seats: [N] int64 on the device, each at most once but the padding seat.
            kind: at least that of every seat, and not OUTSIDE.
        Returns: [N] int64.
        """
        return self._chooser.choose(logits, seats, self._state, self.last_token, Choice(kind))

    def sample_outside(
        self, logits: torch.Tensor, seats_host: Sequence[int] | np.ndarray, seats_device: torch.Tensor
    ) -> PendingSample:
        """As `choose`, for any seats, with penalties, min_tokens and log-probabilities. Not to be captured.

        Args: seats_host, seats_device: the same numbers, without the padding seat.
        """
        batch = self._outside_of(np.asarray(seats_host, dtype=np.int64))
        if batch.choice is None:
            token_ids = torch.empty_like(seats_device)
        else:
            seats = seats_device if batch.seats is None else batch.seats
            token_ids = self._chooser.choose(logits, seats, self._state, self.last_token, batch.choice)
        for edit in batch.edits:
            edited = self._penalties.apply(logits, edit.rows)
            if edit.forbidden is not None:
                edited.index_put_(edit.forbidden, self._minus_infinity)
            chosen = self._chooser.choose(edited, edit.seats, self._state, self.last_token, edit.choice)
            self._penalties.record(edit.rows, chosen)
            token_ids.index_copy_(0, edit.rows.rows, chosen)
        self._loosen(batch.forbidding)
        packed = None
        if batch.asking is not None:
            widest = max(batch.num_top)
            shares = [batch.asking[at : at + _EDITED_ROWS] for at in range(0, len(batch.asking), _EDITED_ROWS)]
            packed = torch.cat([pack_logprobs(logits[rows], token_ids[rows], widest) for rows in shares])
        return PendingSample(token_ids, packed, batch.rows, batch.num_top)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile and load the kernels, for logits of this dtype; tokens go to the padding seat."""
        seats = torch.full((1,), self._num_seats, dtype=torch.int64, device=self._device)
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        edited = self._penalties.apply(logits, self._penalties.rows([0], [self._num_seats]))
        for rows in (logits, edited):
            for choice in Choice:
                self._chooser.choose(rows, seats, self._state, self.last_token, choice)

    def _kind_of(self, seat: int, params: SamplingParams) -> SamplingKind:
        outside = params.has_penalties or params.logprobs is not None or self._bound[seat] > 0
        return SamplingKind.OUTSIDE if outside else SamplingKind(int(self._choices[seat]))

    def _loosen(self, forbidding: tuple[int, ...]) -> None:
        """One output more of seats that may not end yet."""
        for seat in forbidding:
            self._bound[seat] -= 1
            if self._bound[seat] == 0:
                params = self._params[seat]
                assert params is not None
                self._kinds[seat] = self._kind_of(seat, params)
                self._version += 1

    def _outside_of(self, seats: np.ndarray) -> _Outside:
        key = (self._version, seats.tobytes())
        if self._outside is None or self._outside.key != key:
            self._outside = self._partition(key, seats)
        return self._outside

    def _partition(self, key: tuple[int, bytes], seats: np.ndarray) -> _Outside:
        edited: list[int] = []
        asking: list[tuple[int, int]] = []
        for row, seat in enumerate(seats.tolist()):
            params = self._params[seat]
            assert params is not None, f"seat {seat} is free"
            if params.has_penalties or self._bound[seat] > 0:
                edited.append(row)
            if params.logprobs is not None:
                asking.append((row, min(params.logprobs, self._vocab_size)))
        plain = np.delete(self._choices[seats], edited)
        masked = seats.copy()
        masked[edited] = self._num_seats
        return _Outside(
            key=key,
            seats=self._uploads.new(masked) if edited else None,
            choice=Choice(int(plain.max())) if len(plain) else None,
            edits=tuple(self._edit(rows, seats[rows].tolist()) for rows in _chunks(edited)),
            forbidding=tuple(s for s in seats.tolist() if self._bound[s] > 0),
            asking=self._uploads.new(np.array([row for row, _ in asking], dtype=np.int64)) if asking else None,
            rows=tuple(row for row, _ in asking),
            num_top=tuple(count for _, count in asking),
        )

    def _edit(self, rows: Sequence[int], seats: Sequence[int]) -> _Edit:
        forbidden = [(at, t) for at, seat in enumerate(seats) if self._bound[seat] > 0 for t in self._stop_ids[seat]]
        at, tokens = self._uploads.new(np.array(forbidden, dtype=np.int64).reshape(-1, 2).T)
        return _Edit(
            rows=self._penalties.rows(rows, seats),
            seats=self._uploads.new(np.array(seats, dtype=np.int64)),
            forbidden=(at, tokens) if forbidden else None,
            choice=Choice(int(self._choices[list(seats)].max())),
        )


def _chunks(values: Sequence[int]) -> list[Sequence[int]]:
    return [values[at : at + _EDITED_ROWS] for at in range(0, len(values), _EDITED_ROWS)]
