"""Chooses the next token of every seat, and keeps what that takes between steps. Knows no model and no scheduler.

The order of the stages of one row:

    raw logits ── log_softmax ──> logprobs, if asked for
        │
    repetition penalty, then presence and frequency      prompt and outputs, outputs alone
        │
    end tokens forbidden                                 fewer than min_tokens outputs so far
        │
        ├── temperature 0: the largest logit, the lowest id of equal ones
        │
    temperature, min_p, top_k, top_p                     each renormalises what the one before it left
        │
    the draw                                             uniform = hash(seed, number of the output)

A row pays only for the stages that it asks for; which rows those are is worked out when the batch changes, not in
every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.core import SamplingParams, TokenLogprobs
from interleaf.engine.logprobs import token_logprobs
from interleaf.engine.penalties import PenaltyBook, PenaltyRows
from interleaf.engine.sampling_math import Filters, draw, first_argmax, stream_key, uniforms


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row.

    Attributes:
        token_ids: [N] int64, on the device.
        logprobs: None if no row asked for any; else one entry per row, None for those that did not.
    """

    token_ids: torch.Tensor
    logprobs: tuple[TokenLogprobs | None, ...] | None


@dataclass(slots=True)
class _Occupant:
    """The sequence in a seat; `outputs` counts its tokens so far, those that the host has not read included."""

    params: SamplingParams
    key: int
    stop_ids: tuple[int, ...]
    outputs: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def forbids(self) -> bool:
        return self.outputs < self.params.min_tokens and bool(self.stop_ids)


@dataclass(slots=True)
class _Batch:
    """Which rows of a batch need which stage.

    `work` are the rows that need more than an argmax, copied out in the order [only top_p | other filters | no filter |
    greedy]: each stage is a range of them or an index list into them.

    Attributes:
        work: [M] int64 rows of the batch; None if there are none.
        all_work: every row is in `work`.
        num_drawn: the first rows of `work`, those that are not greedy.
        temperature, keys, index: [num_drawn]; `index` is the number of the output drawn next.
        forbidden: (positions in `work`, token ids).
        expires: outputs until a row reaches its min_tokens and the batch is worked out anew; None = never.
        logprob_rows, num_top: [L] int64.
    """

    seats: np.ndarray
    occupants: tuple[_Occupant, ...]
    work: torch.Tensor | None
    all_work: bool
    num_drawn: int
    temperature: torch.Tensor
    filters: Filters
    keys: torch.Tensor
    index: torch.Tensor
    penalties: PenaltyRows | None
    penalty_rows: torch.Tensor
    penalty_at: torch.Tensor
    forbidden: tuple[torch.Tensor, torch.Tensor] | None
    expires: int | None
    logprob_rows: torch.Tensor | None
    num_top: torch.Tensor


class Sampler:
    """Sampling state of every seat.

    A token depends on the row's logits, the sequence's own past, its seed and the number of the output, and on nothing
    else. A row of NaN gives some token of the vocabulary and leaves its neighbours alone.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._occupants: list[_Occupant | None] = [None] * num_seats
        self._penalties = PenaltyBook(vocab_size, device)
        self._batch: _Batch | None = None

    def start(
        self,
        seat: int,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        prompt_tokens: int,
        stop_ids: Sequence[int],
    ) -> None:
        """A sequence takes a free seat.

        Args:
            seed: output i is drawn from (seed, i).
            token_ids: the prompt, then outputs known already: a preempted sequence goes on as if nothing had happened.
            prompt_tokens: how many of `token_ids` are the prompt.
            stop_ids: not chosen before `params.min_tokens` outputs; those beyond the vocabulary cannot be anyway.
        """
        assert self._occupants[seat] is None, f"seat {seat} is taken"
        stop = tuple(t for t in stop_ids if t < self._vocab_size)
        self._occupants[seat] = _Occupant(params, stream_key(seed), stop, len(token_ids) - prompt_tokens)
        if params.has_penalties:
            self._penalties.open(seat, params, token_ids, prompt_tokens)
        self._batch = None

    def vacate(self, seat: int) -> None:
        """The sequence leaves its seat."""
        assert self._occupants[seat] is not None, f"seat {seat} is free"
        self._occupants[seat] = None
        self._penalties.close(seat)
        self._batch = None

    def sample(self, logits: torch.Tensor, seats: Sequence[int] | np.ndarray) -> Sampled:
        """Choose one token for each seat, and count it as the seat's next output.

        Args: logits: [N, V], any float dtype, left as it is.   seats: [N], each at most once.
        """
        assert logits.shape == (len(seats), self._vocab_size), f"logits {tuple(logits.shape)} for {len(seats)} seats"
        batch = self._batch_of(seats)
        token_ids = self._choose(logits, batch)
        logprobs = None
        if batch.logprob_rows is not None:
            rows = batch.logprob_rows
            found = token_logprobs(logits[rows], token_ids[rows], batch.num_top)
            entries: list[TokenLogprobs | None] = [None] * len(seats)
            for row, entry in zip(rows.tolist(), found, strict=True):
                entries[row] = entry
            logprobs = tuple(entries)
        self._advance(batch, token_ids)
        return Sampled(token_ids, logprobs)

    def _choose(self, logits: torch.Tensor, batch: _Batch) -> torch.Tensor:
        if batch.work is None:
            return first_argmax(logits)
        edited = logits.index_select(0, batch.work).float()
        if batch.penalties is not None:
            self._penalties.apply(edited, batch.penalty_at, batch.penalties)
        if batch.forbidden is not None:
            edited[batch.forbidden] = -torch.inf
        chosen = first_argmax(edited)
        if n := batch.num_drawn:
            uniform = uniforms(batch.keys, batch.index)
            chosen[:n] = draw(edited[:n], chosen[:n], batch.temperature, batch.filters, uniform)
        token_ids = torch.empty_like(chosen) if batch.all_work else first_argmax(logits)
        return token_ids.index_copy_(0, batch.work, chosen)

    def _advance(self, batch: _Batch, token_ids: torch.Tensor) -> None:
        for occupant in batch.occupants:
            occupant.outputs += 1
        batch.index.add_(1)
        if batch.penalties is not None:
            self._penalties.record(batch.penalties, token_ids[batch.penalty_rows])
        if batch.expires is not None:
            batch.expires -= 1

    def _batch_of(self, seats: Sequence[int] | np.ndarray) -> _Batch:
        key = np.asarray(seats, dtype=np.int64)
        batch = self._batch
        if batch is None or batch.expires == 0 or not np.array_equal(batch.seats, key):
            batch = self._batch = self._partition(key.copy())
        return batch

    def _partition(self, seats: np.ndarray) -> _Batch:
        occupants = []
        for seat in seats.tolist():
            occupant = self._occupants[seat]
            assert occupant is not None, f"seat {seat} is free"
            occupants.append(occupant)
        params = [o.params for o in occupants]

        only_top_p: list[int] = []
        other_filters: list[int] = []
        no_filter: list[int] = []
        greedy: list[int] = []
        for row, o in enumerate(occupants):
            p = o.params
            if o.is_greedy:
                if o.forbids or p.has_penalties:
                    greedy.append(row)
            elif 0 < p.top_k < self._vocab_size or p.min_p > 0.0:
                other_filters.append(row)
            elif p.top_p < 1.0:
                only_top_p.append(row)
            else:
                no_filter.append(row)
        filtered = only_top_p + other_filters
        drawn = filtered + no_filter
        work = drawn + greedy

        penalised = [(at, row) for at, row in enumerate(work) if params[row].has_penalties]
        forbidden = [
            (at, token) for at, row in enumerate(work) if occupants[row].forbids for token in occupants[row].stop_ids
        ]
        asks = [row for row, p in enumerate(params) if p.logprobs is not None]
        return _Batch(
            seats=seats,
            occupants=tuple(occupants),
            work=self._ints(work) if work else None,
            all_work=len(work) == len(seats),
            num_drawn=len(drawn),
            temperature=self._reals([params[r].temperature for r in drawn], torch.float32),
            filters=Filters(
                top_k=self._ints([min(params[r].top_k or self._vocab_size, self._vocab_size) for r in filtered]),
                top_p=self._reals([params[r].top_p for r in filtered], torch.float64),
                min_p=self._reals([params[r].min_p for r in filtered], torch.float64),
                nucleus=self._ints([i < len(only_top_p) for i in range(len(filtered))]).bool(),
                num_nucleus=len(only_top_p),
            ),
            keys=self._ints([occupants[r].key for r in drawn]),
            index=self._ints([occupants[r].outputs for r in drawn]),
            penalties=self._penalties.rows([int(seats[row]) for _, row in penalised]) if penalised else None,
            penalty_rows=self._ints([row for _, row in penalised]),
            penalty_at=self._ints([at for at, _ in penalised]),
            forbidden=(self._ints([at for at, _ in forbidden]), self._ints([t for _, t in forbidden]))
            if forbidden
            else None,
            expires=min((o.params.min_tokens - o.outputs for o in occupants if o.forbids), default=None),
            logprob_rows=self._ints(asks) if asks else None,
            num_top=self._ints([params[r].logprobs or 0 for r in asks]),
        )

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _reals(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
