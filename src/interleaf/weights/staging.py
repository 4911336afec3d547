"""Ranges of files into tensors on a GPU, at the speed of reading them. Knows bytes; no format, no names.

A mapped file costs a page fault for every 4 KB on first touch, which one thread takes at 2 GB/s where reading into
memory that is there runs at 7. So ranges are read, by several threads, into a pinned buffer, while the one before is on
its way to the device.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from interleaf.errors import CheckpointError

BUFFER_BYTES = 2**26
PIECE_BYTES = 2**22
_THREADS = 8


class DeviceReader:
    """Two pinned buffers and the threads that fill them. Used by one thread; `close` releases both."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if on_gpu else None  # type: ignore[no-untyped-call]
        self._turn = 0
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "weights")

    def read(self, file: int, first: int, out: Tensor) -> None:
        """Fill a contiguous tensor with the bytes of a file from `first` on; enqueued on the current stream.

        Args: file: a descriptor.
        Raises: CheckpointError: the file ends before; OSError: it cannot be read.
        """
        flat = out.view(-1).view(torch.uint8)
        for at, part in enumerate(flat.split(BUFFER_BYTES)):  # type: ignore[no-untyped-call]
            buffer = self._buffers[self._turn][: len(part)]
            if self._sent is not None:
                self._sent[self._turn].synchronize()
            self._fill(file, first + at * BUFFER_BYTES, buffer)
            part.copy_(buffer, non_blocking=True)
            if self._sent is not None:
                self._sent[self._turn].record()
            self._turn ^= 1

    def close(self) -> None:
        """Wait for the copies under way, then let go of the buffers."""
        for sent in self._sent or ():
            sent.synchronize()
        self._threads.shutdown()
        self._buffers.clear()

    def _fill(self, file: int, first: int, buffer: Tensor) -> None:
        view = buffer.numpy().data
        pieces = range(0, len(view), PIECE_BYTES)
        for _ in self._threads.map(lambda at: _read_at(file, first + at, view[at : at + PIECE_BYTES]), pieces):
            pass


def _read_at(file: int, first: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], first + done)
        if not count:
            raise CheckpointError(f"a weight file ends after {first + done} bytes, {len(view) - done} more are needed")
        done += count
