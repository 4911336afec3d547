"""Small arrays on their way to the device, which a step waits for. Knows bytes; not what they mean.

On a GPU a kernel reads them out of pinned memory. Copies to the device all go through one copy engine, whatever their
streams, and a small one would stand in line behind every adapter's copy that has been enqueued: with 24 copies of 84 MB
enqueued, a step of 10 ms took 24 (docs/adr/0020-uploads-by-kernels.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 4
_WORDS_AT_ONCE = 1024
_RING_BYTES = 2**18


def send(host: Tensor, target: Tensor) -> None:
    """Enqueue a copy on the current stream. `host` must not change before it is done.

    Args:
        host: pinned, if the target is on a GPU.
        target: of the same number of bytes, a multiple of 4. Both are contiguous.
    """
    if not target.is_cuda:
        target.copy_(host)
        return
    if not host.numel():
        return
    from interleaf.kernels.pull import pull

    source, words = host.view(torch.int32), target.view(torch.int32)
    count = words.numel()
    pull[(-(-count // _WORDS_AT_ONCE),)](source, words, count, BLOCK=_WORDS_AT_ONCE, num_warps=4)


class Uploads:
    """Sends arrays that may change at once, by way of pinned memory of its own. One thread uses it, and one stream.

    The memory is a ring of two halves: whoever comes back to one waits until what was sent from it has been read, which
    has happened long ago unless steps send more than both hold.

    Args: num_bytes: of both halves.

    Attributes:
        device: where arrays go.
    """

    def __init__(self, device: torch.device, num_bytes: int = _RING_BYTES) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._size = num_bytes // 2 // _WORD * _WORD
        self._halves = [torch.empty(self._size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]
        self._read: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._used = 0

    def new(self, values: NDArray[Any]) -> Tensor:
        """Enqueue a copy to a new tensor of the same shape and type, which is returned."""
        words = torch.empty(-(-values.nbytes // _WORD), dtype=torch.int32, device=self.device)
        self._send(values, words)
        dtype = torch.from_numpy(values[:0]).dtype
        return words.view(torch.uint8)[: values.nbytes].view(dtype).view(values.shape)

    def send(self, values: NDArray[np.int32], target: Tensor) -> None:
        """Enqueue a copy to `target`, contiguous int32 of as many elements."""
        assert values.size == target.numel(), f"{values.size} values for {target.numel()} places"
        self._send(values, target.view(-1))

    def _send(self, values: NDArray[Any], target: Tensor) -> None:
        """Args: target: [N] int32; 4 N may exceed the values' bytes by up to 3."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        at = 0
        while at < len(data):
            if self._used == self._size:
                self._turn_over()
            count = min(len(data) - at, self._size - self._used)
            stop = at + -(-count // _WORD) * _WORD
            host = self._halves[self._turn][self._used : self._used + stop - at]
            host.numpy()[:count] = data[at : at + count]
            send(host.view(torch.int32), target[at // _WORD : stop // _WORD])
            self._used += stop - at
            at = stop

    def _turn_over(self) -> None:
        """Go on in the other half."""
        if self._on_gpu:
            read = self._read[self._turn] = self._read[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            read.record()
        self._turn ^= 1
        self._used = 0
        if (before := self._read[self._turn]) is not None:
            before.synchronize()
