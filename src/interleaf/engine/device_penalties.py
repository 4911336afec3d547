"""What the penalised sequences have said so far, as counts on a GPU. Other sequences cost nothing here.

On a GPU a row of counters is read in less time than a list of tokens is gathered, changed and put back (the CPU's way,
penalties.py), and nothing depends on how long the list is, which only the host could say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from interleaf.core import SamplingParams
from interleaf.kernels.uploads import Uploads

_MOST_OUTPUTS = 16_383
"""Of one token, that are counted: the counters are int16."""

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows of a batch that are copied out, and how they are penalised.

    Attributes:
        rows: [N] int64, of the batch.   slots: [N] int64, in the book; -1: not penalised.
        strength: [N, 3] float32, repetition, presence, frequency.
        counted, counted_slots: [P] int64, those of the N with a slot, and the slots.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    strength: torch.Tensor
    counted: torch.Tensor
    counted_slots: torch.Tensor


class DevicePenaltyBook:
    """Counters of the sequences that have penalties, [slots, V] int16: twice the outputs, plus one for the prompt's."""

    def __init__(self, vocab_size: int, uploads: Uploads, *, kernels: bool) -> None:
        self._kernels = kernels
        self._uploads = uploads
        self._device = device = uploads.device
        self._vocab_size = vocab_size
        self._seen = torch.zeros(0, vocab_size, dtype=torch.int16, device=device)
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._params: dict[int, SamplingParams] = {}

    @property
    def num_slots(self) -> int:
        """Rows of counters held in memory, in use or free."""
        return len(self._seen)

    def open(self, seat: int, params: SamplingParams, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """Begin to count, with the tokens known already, the prompt first."""
        assert seat not in self._slots, f"seat {seat} has counters already"
        if not self._free:
            first, count = self.num_slots, max(1, self.num_slots)
            self._seen = torch.cat([self._seen, self._seen.new_zeros(count, self._vocab_size)])
            self._free.extend(range(first, first + count))
        slot = self._free.pop()
        ids = np.asarray(token_ids, dtype=np.int64)
        in_prompt = np.bincount(ids[:prompt_tokens], minlength=self._vocab_size) > 0
        outputs = np.bincount(ids[prompt_tokens:], minlength=self._vocab_size).clip(max=_MOST_OUTPUTS)
        counts = (2 * outputs + in_prompt).astype(np.int16)
        said = np.flatnonzero(counts)  # a few of all tokens
        self._seen[slot].zero_().index_copy_(0, self._uploads.new(said), self._uploads.new(counts[said]))
        self._slots[seat] = slot
        self._params[seat] = params

    def close(self, seat: int) -> None:
        """End the counters of a sequence, if it has any."""
        slot = self._slots.pop(seat, None)
        if slot is not None:
            self._free.append(slot)
            del self._params[seat]

    def rows(self, rows: Sequence[int], seats: Sequence[int]) -> PenalisedRows:
        """What `apply` and `record` need for rows of a batch; stays right until one of the seats is closed."""
        slots = np.array([self._slots.get(s, -1) for s in seats], dtype=np.int64)
        strength = np.ones((len(rows), 3), dtype=np.float32)
        for i, seat in enumerate(seats):
            if (p := self._params.get(seat)) is not None:
                strength[i] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        counted = np.flatnonzero(slots >= 0)
        return PenalisedRows(
            rows=self._uploads.new(np.asarray(rows, dtype=np.int64)),
            slots=self._uploads.new(slots),
            strength=self._uploads.new(strength),
            counted=self._uploads.new(counted),
            counted_slots=self._uploads.new(slots[counted]),
        )

    def apply(self, logits: torch.Tensor, rows: PenalisedRows) -> torch.Tensor:
        """Copy rows of `logits`, [N, V], and penalise the copies as PenaltyBook.apply does.

        Returns: [rows, V] float32.
        """
        if not self._kernels:
            return self._apply_torch(logits, rows)
        from interleaf.kernels.penalties import penalise

        out = torch.empty(len(rows.rows), self._vocab_size, dtype=torch.float32, device=self._device)
        grid = (len(out), -(-self._vocab_size // _BLOCK))
        # A fused product and difference would round once where the CPU rounds twice.
        penalise[grid](
            logits, logits.stride(0), rows.rows, rows.slots, self._seen, rows.strength, out,
            VOCAB=self._vocab_size, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    def _apply_torch(self, logits: torch.Tensor, rows: PenalisedRows) -> torch.Tensor:
        values = logits[rows.rows].float()
        changed = values[rows.counted]
        counts = self._seen[rows.counted_slots].int()
        outputs = counts >> 1
        repetition, presence, frequency = rows.strength[rows.counted, :, None].unbind(1)
        scaled = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = torch.where(counts > 0, scaled, changed)
        values[rows.counted] = changed - presence * (outputs > 0) - frequency * outputs
        return values

    def record(self, rows: PenalisedRows, token_ids: torch.Tensor) -> None:
        """Count one output token of each row: [N] int64."""
        if len(rows.counted):
            at = rows.counted_slots * self._vocab_size + token_ids.index_select(0, rows.counted)
            seen = self._seen.view(-1)
            before = seen.index_select(0, at)
            seen.index_copy_(0, at, torch.where(before < 2 * _MOST_OUTPUTS, before + 2, before))
