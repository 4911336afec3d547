"""Small arrays on their way to the device, which a step waits for. Knows bytes; not what they mean.

On a GPU a kernel reads them out of pinned memory. Copies to the device all go through one copy engine, whatever their
streams, and a small one would stand in line behind every adapter's copy that has been enqueued: with 24 copies of 84 MB
enqueued, a step of 10 ms took 24 (docs/adr/0020-uploads-by-kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = 4
_WORDS_AT_ONCE = 1024
_BLOCK_BYTES = 2**17


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


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


class Uploads:
    """Sends arrays that may change at once, by way of pinned memory of its own. One thread uses it, and one stream.

    The memory is a ring of blocks. One is used again when what was sent from it has been read; where that has yet to
    happen, the ring gets another block. So nothing waits, and there is as much memory as is on its way at most.

    Args:
        block_bytes: of two blocks to begin with, and of each other.
        new_event: None: what is sent has been read when the call returns.

    Attributes:
        device: where arrays go.
    """

    def __init__(
        self, device: torch.device, block_bytes: int = _BLOCK_BYTES, *, new_event: Callable[[], Event] | None = None
    ) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._new_event = new_event or (_cuda_event if on_gpu else None)
        self._pin = on_gpu
        self._size = block_bytes // _WORD * _WORD
        self._blocks = [self._new_block() for _ in range(2)]
        self._turn = 0
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self._size * len(self._blocks)

    def new(self, values: NDArray[Any]) -> Tensor:
        """Enqueue a copy to a new tensor of the same shape and type, which is returned."""
        words = torch.empty(-(-values.nbytes // _WORD), dtype=torch.int32, device=self.device)
        self._send(values, words)
        dtype = torch.from_numpy(values[:0]).dtype
        return words.view(torch.uint8)[: values.nbytes].view(dtype).view(values.shape)

    def send(self, values: NDArray[np.int32], target: Tensor) -> None:
        """Enqueue a copy to `target`, contiguous int32 of as many elements."""
        fits = values.dtype == np.int32 and target.dtype == torch.int32
        assert fits, f"{values.dtype} values for a target of {target.dtype}"
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
            host = self._blocks[self._turn].memory[self._used : self._used + stop - at]
            host.numpy()[:count] = data[at : at + count]
            send(host.view(torch.int32), target[at // _WORD : stop // _WORD])
            self._used += stop - at
            at = stop

    def _turn_over(self) -> None:
        """Go on in the next block."""
        full = self._blocks[self._turn]
        if full.read is not None:
            full.read.record()
        self._turn = (self._turn + 1) % len(self._blocks)
        after = self._blocks[self._turn]
        if after.read is not None and not after.read.query():
            self._blocks.insert(self._turn, self._new_block())
        self._used = 0

    def _new_block(self) -> _Block:
        memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pin)
        return _Block(memory, None if self._new_event is None else self._new_event())


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of the ring.

    Attributes:
        read: passes when all that was sent from it has been read; one that was never recorded has passed.
    """

    memory: Tensor
    read: Event | None


def _cuda_event() -> Event:
    return cast(Event, torch.cuda.Event())  # type: ignore[no-untyped-call]
