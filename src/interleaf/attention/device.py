"""What an attention backend on a GPU is given: a step's rows, as tensors that a graph can keep. No implementation.

On a GPU page tables live on the device, and nothing that is computed there comes back to the host: the few numbers by
which a backend chooses its launches it reads from the host's copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from interleaf.attention.base import StepAttention

HostInts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of one step on a device: sequences of one decode row each first, then those of chunks.

    For a graph the tensors are static buffers whose contents the runner rewrites before each replay; rows that pad the
    batch belong to the padding seat, whose only page nobody owns.

    Attributes:
        table: [seats + 1, width] int32, page ids of each seat in order; entries past a sequence's pages mean nothing.
            The last row is the padding seat's.
        seats: [S] int32, seat of each sequence.
        kv_lens: [S] int32, tokens of each sequence once this step's rows are written.
        q_starts: [S + 1] int32, first row of each sequence.
        slots: [T] int64, where each row's K and V go: page * page_tokens + offset in the page.
        positions: [T] int64.
        num_decode: leading sequences with one row each; in a graph all of them.
        host_seats, host_kv_lens, host_q_lens: [S], the same on the host, padding included.
    """

    table: Tensor
    seats: Tensor
    kv_lens: Tensor
    q_starts: Tensor
    slots: Tensor
    positions: Tensor
    num_decode: int
    host_seats: HostInts
    host_kv_lens: HostInts
    host_q_lens: HostInts


class DeviceAttention(Protocol):
    """Knows the pool; works out once per step what every layer shares. Never waits for the device."""

    def prepare(self, rows: DeviceRows) -> StepAttention:
        """Attention of a step that is launched kernel by kernel."""

    def prepare_graph(self, rows: DeviceRows) -> StepAttention:
        """Attention of a step of decode rows that a CUDA graph holds.

        Called before the capture, and again with the same tensors and this step's host arrays before every replay. What
        the returned object launches depends on static buffers only.
        """
