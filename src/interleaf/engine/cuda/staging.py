"""A step's small arrays on their way to the device: written in pinned memory, sent at once.

Two host buffers alternate, for the host writes those of step k+1 while those of step k may not have been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from interleaf.engine.cuda.device import Device
from interleaf.kernels.uploads import send

_ALIGNMENT = 16
_KEPT_VIEWS = 256


@dataclass(frozen=True, slots=True)
class Staged:
    """One array in both places.

    Attributes:
        host: numpy, written before `send`.
        device: valid for what is enqueued after `send`.
    """

    host: np.ndarray
    device: torch.Tensor


class Staging:
    """Arrays of one step at a time. `begin`, then `take` and fill, then `send` on the compute stream.

    The same calls of `take` after `begin` give the same device addresses, which is what a captured graph relies on.

    Args:
        num_bytes: of all arrays of a step at most.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._host_bytes = [device.pinned(num_bytes) for _ in range(2)]
        self._sent = [device.event() for _ in range(2)]
        self._turn = 0
        self._used = 0
        self._views: dict[tuple[int, int, int, torch.dtype], Staged] = {}  # of decode steps, which take the same again

    def begin(self) -> None:
        """Start the arrays of the next step; waits if the buffer's last copy, two steps ago, is not done."""
        self._turn ^= 1
        self._sent[self._turn].synchronize()
        self._used = 0

    def room(self) -> int:
        """Bytes that can still be taken."""
        return len(self._device_bytes) - self._used

    def take(self, count: int, dtype: torch.dtype) -> Staged:
        """An array of `count` elements, with whatever was in it before."""
        first = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        stop = first + count * dtype.itemsize
        assert stop <= len(self._device_bytes), f"a step's arrays take {stop} of {len(self._device_bytes)} bytes"
        self._used = stop
        key = (self._turn, first, count, dtype)
        found = self._views.get(key)
        if found is None:
            host = self._host_bytes[self._turn][first:stop].view(dtype)
            found = Staged(host.numpy(), self._device_bytes[first:stop].view(dtype))
            if len(self._views) < _KEPT_VIEWS:
                self._views[key] = found
        return found

    def put(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Stage a copy of `values`. Returns: where it will be on the device."""
        staged = self.take(len(values), dtype)
        staged.host[:] = values
        return staged.device

    def send(self) -> None:
        """Enqueue the copy of everything taken since `begin`."""
        if self._used:
            host = self._host_bytes[self._turn]
            used = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            send(host[:used], self._device_bytes[:used])
        self._sent[self._turn].record()
