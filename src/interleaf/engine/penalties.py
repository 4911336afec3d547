"""What the penalised sequences have said so far, on the device. Other sequences cost nothing here.

Logits change only at tokens that a sequence has seen, and those are few beside the vocabulary: a sequence's tokens are
kept as a list, its logits are gathered there, changed, and put back. Tokens that the host has not read yet are in the
list already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.core import SamplingParams

_INITIAL_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The penalised rows of a batch: where they lie in the book, and how they are penalised.

    Attributes:
        slots: [N] int64, and the same numbers on the host.
        repetition, presence, frequency: [N, 1] float32.
    """

    slots: torch.Tensor
    host_slots: np.ndarray
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class PenaltyBook:
    """Token lists and output counts of the sequences that have penalties.

    Invariant: columns of a list beyond its sequence's length repeat the sequence's first token, so that lists of
    different lengths make one rectangle: a token met twice is written twice with the same value.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._tokens = torch.zeros(0, _INITIAL_CAPACITY, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._lengths = np.zeros(0, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._params: dict[int, SamplingParams] = {}

    @property
    def num_slots(self) -> int:
        """Lists held in memory, in use or free; each has a counter per token of the vocabulary."""
        return len(self._lengths)

    def __contains__(self, seat: int) -> bool:
        return seat in self._slots

    def open(self, seat: int, params: SamplingParams, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Begin the list of a sequence with the tokens known already, the prompt first."""
        assert seat not in self._slots, f"seat {seat} has a list already"
        if not self._free:
            self._add_slots(max(1, self.num_slots))
        self._reserve(len(token_ids) + 1)
        slot = self._free.pop()
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        self._tokens[slot].fill_(ids[0])
        self._tokens[slot, : len(ids)] = ids
        self._counts[slot] = torch.bincount(ids[prompt_tokens:], minlength=self._counts.shape[1])
        self._lengths[slot] = len(ids)
        self._slots[seat] = slot
        self._params[seat] = params

    def close(self, seat: int) -> None:
        """End the list of a sequence, if it has one."""
        slot = self._slots.pop(seat, None)
        if slot is not None:
            self._free.append(slot)
            del self._params[seat]

    def rows(self, seats: Sequence[int]) -> PenaltyRows:
        """Gather what `apply` and `record` need; stays right until one of the seats is closed."""
        slots = np.array([self._slots[s] for s in seats], dtype=np.int64)
        params = [self._params[s] for s in seats]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

        return PenaltyRows(
            slots=torch.from_numpy(slots).to(self._device),
            host_slots=slots,
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
        )

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: PenaltyRows) -> None:
        """Penalise rows `at` of `logits` in place.

        Semantics: for t in prompt or outputs: l = l / repetition if l > 0 else l * repetition; then
        l -= presence * (count[t] > 0) + frequency * count[t], count over outputs.
        Args: logits: [M, V] float32.   at: [N] int64.
        Source: CTRL (Keskar et al. 2019) section 4.1; OpenAI's API reference for presence and frequency.
        """
        length = int(self._lengths[rows.host_slots].max())
        ids = self._tokens[rows.slots, :length]
        place = (at[:, None], ids)
        counts = self._counts[rows.slots[:, None], ids]
        seen = logits[place]
        seen = torch.where(seen > 0, seen / rows.repetition, seen * rows.repetition)
        logits[place] = seen - rows.presence * (counts > 0) - rows.frequency * counts

    def record(self, rows: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Append one output token to each row's list."""
        lengths = self._lengths[rows.host_slots]
        self._reserve(int(lengths.max()) + 1)
        self._tokens[rows.slots, torch.from_numpy(lengths).to(self._device)] = token_ids
        self._counts[rows.slots, token_ids] += 1
        self._lengths[rows.host_slots] += 1

    def _add_slots(self, count: int) -> None:
        first = self.num_slots
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(count, self._tokens.shape[1])])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(count, self._counts.shape[1])])
        self._lengths = np.concatenate([self._lengths, np.zeros(count, dtype=np.int64)])
        self._free.extend(range(first, first + count))

    def _reserve(self, length: int) -> None:
        """Make the lists at least this long."""
        capacity = self._tokens.shape[1]
        if length > capacity:
            extra = max(length, 2 * capacity) - capacity
            self._tokens = torch.cat([self._tokens, self._tokens[:, :1].expand(-1, extra)], dim=1)
