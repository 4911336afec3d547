"""FlashInfer's plans on their way to the device. Knows how long a plan may be; not what it says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from interleaf.kernels.uploads import send

PLAN_BYTES = 8 * 2**20
"""A plan takes some 20 bytes per tile of queries and 4 per row."""
_ALIGNMENT = 16


class PlanSender:
    """Sends plans to the device as everything that a step waits for is sent (interleaf.kernels.uploads).

    FlashInfer's planner enqueues a copy of its own, which would wait for all copies of adapters. It is let: on a stream
    that nobody waits for, to memory that nobody reads.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._aside = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        # Two of each step, in turn: a step's plans may be on their way while the next step's are made.
        self._buffers = [torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(4)]
        self._read = [torch.cuda.Event() for _ in self._buffers] if on_gpu else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def begin(self, space: Tensor) -> tuple[Tensor, Tensor]:
        """Returns: what to plan in: on the host, and for the planner's own copy, as large as `space`."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._read is not None:
            self._read[self._turn].synchronize()  # of two steps ago: a step that has been read back is past it
        return self._buffers[self._turn], self._aside[: len(space)]

    def planning(self) -> AbstractContextManager[object]:
        """Inside, the planner's own copy is out of everybody's way."""
        return nullcontext() if self._stream is None else cast(Any, torch.cuda.stream(self._stream))

    def send(self, plan: Any, num_seqs: int, space: Tensor) -> None:
        """Enqueue the upload of the plan just made to `space`."""
        num_bytes = plan_bytes(plan, num_seqs)
        assert num_bytes <= len(space), f"a plan of up to {num_bytes} bytes for {len(space)}"
        send(self._buffers[self._turn][:num_bytes], space[:num_bytes])
        if self._read is not None:
            self._read[self._turn].record()


def plan_bytes(plan: Sequence[int], num_seqs: int) -> int:
    """Bytes that a plan takes at most: of three int32 and a flag for every tile, two lists with an entry more than
    there are sequences and rows, two single numbers, each begun at a multiple of 16.

    Args: plan: what FlashInfer answered when it made it, number of tiles and of rows first.
    """
    tiles, rows = plan[0], plan[1]
    return -(-(13 * tiles + 4 * (num_seqs + rows + 4) + 8 * _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
