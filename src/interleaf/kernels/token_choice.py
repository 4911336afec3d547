"""Launches the sampling kernels. Knows rows, scratch, and the seats' state as a tensor; no sequence.

Everything that a launch needs lies in tensors made once, so that a CUDA graph can hold it; nothing is asked of the
device.
"""

from __future__ import annotations

from enum import IntEnum

import torch

STATE_FIELDS = 6
"""A seat's state: key of its stream, outputs so far, top_k (the vocabulary's size: off), then float64 bits:
temperature (0: greedy), top_p, min_p."""

_BLOCK = 4096
"""Columns that a program works on at a time: 16 for each of 256 threads, two or four loads of 16 bytes."""

_PROGRAMS = 2048
"""Programs that fewer rows are cut into: two for each of those that an H200 runs at a time (132 x 8)."""

_BINS = 64  # as in kernels/sampling.py

_NEAR = 2048
"""Largest logits of a filtered row looked at first."""

_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are 0 in every number of a type."""


class Choice(IntEnum):
    """What the rows of a batch need at most; each includes those before it."""

    GREEDY = 0
    DRAWN = 1
    FILTERED = 2


class TokenChooser:
    """Scratch for up to `max_rows` rows, and the launches. One stream uses it at a time.

    Args:
        max_rows: rows of a call at most.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._num_blocks = -(-vocab_size // _BLOCK)
        parts = max(max_rows, _PROGRAMS)
        self._best = torch.empty(parts, dtype=torch.int64, device=device)
        self._bins = torch.empty(parts, _BINS, dtype=torch.int32, device=device)
        self._sums = torch.empty(max_rows, self._num_blocks, dtype=torch.int64, device=device)
        self._near = torch.empty(max_rows, _NEAR, dtype=torch.float32, device=device)
        self._near_ids = torch.empty(max_rows, _NEAR, dtype=torch.int32, device=device)
        self._num_near = torch.empty(max_rows, dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(vocab_size: int, max_rows: int) -> int:
        """Of device memory that a chooser holds."""
        return max(max_rows, _PROGRAMS) * (8 + 4 * _BINS) + max_rows * (8 * -(-vocab_size // _BLOCK) + 8 * _NEAR + 4)

    def choose(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        state: torch.Tensor,
        last_token: torch.Tensor,
        choice: Choice,
    ) -> torch.Tensor:
        """Choose one token for each row.

        Semantics: as sampling_math: greedy, else the inverse of the cumulative distribution at a uniform that is a
        function of the seat's key and number of outputs.
        Args:
            logits: [N, V] float32, float16 or bfloat16, columns side by side; left as they are.
            seats: [N] int64.   state: [seats, STATE_FIELDS] int64, whose outputs are counted up.
            last_token: [seats] int64, set to the tokens.
        Returns: [N] int64.
        Raises: ValueError: more rows than the scratch holds.
        """
        from interleaf.kernels import sampling

        num_rows, vocab_size = logits.shape
        assert vocab_size == self._vocab_size, f"logits of {vocab_size} tokens for a vocabulary of {self._vocab_size}"
        assert logits.stride(1) == 1, f"logits must have their columns side by side, got strides {logits.stride()}"
        if num_rows > self._max_rows:
            raise ValueError(f"{num_rows} rows are sampled, but at most {self._max_rows} can be")
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if not num_rows:
            return token_ids
        drawn, filtered = choice >= Choice.DRAWN, choice is Choice.FILTERED
        per_part = -(-self._num_blocks // min(self._num_blocks, max(1, _PROGRAMS // num_rows)))
        splits = -(-self._num_blocks // per_part)
        rows = (logits, logits.stride(0), seats, state)
        near = (self._near, self._near_ids, self._num_near)
        columns = {"VOCAB": vocab_size, "BLOCK": _BLOCK}
        blocks = 1 << (self._num_blocks - 1).bit_length()
        parts = (num_rows, splits)

        sampling.best_parts[parts](*rows[:2], self._best, splits, per_part, **columns, num_warps=8)
        if drawn:
            sampling.weigh[parts](
                *rows, self._best, self._sums, self._bins, splits, per_part,
                **columns, SPLITS=blocks, FILTERED=filtered, num_warps=8,
            )  # fmt: skip
        if filtered:
            sampling.gather[parts](
                *rows, self._best, self._bins, *near, splits, per_part,
                **columns, SPLITS=blocks, NEAR=_NEAR, num_warps=8,
            )  # fmt: skip
        sampling.choose[(num_rows,)](
            *rows, last_token, token_ids, self._best, self._sums, *near, splits,
            **columns, SPLITS=blocks, BLOCKS=blocks, NEAR=_NEAR, SHIFT=_LOW_BITS[logits.dtype],
            DRAWN=drawn, FILTERED=filtered, num_warps=8 if drawn else 1,
        )  # fmt: skip
        return token_ids
