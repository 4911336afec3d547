"""Memory registered with the GPU's driver, so that copies out of it run at the speed of the link. Knows no adapter.

Registering and letting go hold up every launch of the process meanwhile: 3.6 ms for the small pages of a slab of 20 MB,
2.6 to 4.8 ms to let them go (H200, docs/benchmarks/h200/engine.md). So neither happens as adapters come and go:

- images are moved to blocks, and a block whose image has gone takes the next one of its size;
- a block is a mapping of its own, for the driver registers whole pages and none of them twice, and of huge pages, which
  are there when it is registered: nothing that could be measured.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Lock

import numpy as np
import torch

from interleaf.adapters.image import AdapterImage

_HUGE_PAGE = 2**21
_GRAINS = 16
"""Sizes of blocks between a power of two and the next: a block is larger than its image by a sixteenth at most."""


class PinnedMemory:
    """Blocks of registered memory, for images. `pin` may be called from any thread.

    Args:
        budget_bytes: of blocks. For a new one above it, blocks that hold no image are let go; those that do are not.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = Lock()
        self._free: dict[int, list[_Block]] = {}
        # Appended to by whichever thread an image goes on, at whatever moment: without a lock.
        self._returned: deque[_Block] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self._num_bytes

    @property
    def num_free_bytes(self) -> int:
        """Of blocks without an image."""
        with self._lock:
            self._collect()
            return sum(size * len(blocks) for size, blocks in self._free.items())

    def pin(self, image: AdapterImage) -> AdapterImage:
        """Move an image to registered memory, its own for as long as anything looks at it.

        Returns: the image there; as it is, if there is no memory for another one or the driver refuses to register it:
            its copies are slower, no more.
        """
        data = image.data
        if not data.nbytes or data.is_pinned():
            return image
        size = block_size(data.nbytes)
        block = self._take(size) or self._new_block(size)
        if block is None:
            return image
        target = block.window(data.nbytes)
        # torch keeps `target` for as long as any tensor looks at its memory.
        weakref.finalize(target, _give_back, weakref.ref(self), block).atexit = False
        # By numpy: the other threads go on meanwhile, and none of torch's joins in.
        np.copyto(target, data.reshape(-1).view(torch.uint8).numpy())
        return replace(image, data=torch.from_numpy(target).view(data.dtype).view(data.shape))

    def _take(self, size: int) -> _Block | None:
        """A block without an image; None if there is none. Then there is room for one more, as far as may be."""
        with self._lock:
            self._collect()
            if self._free.get(size):
                return self._free[size].pop()
            for blocks in self._free.values():
                while blocks and self._num_bytes + size > self._budget_bytes:
                    self._num_bytes -= blocks.pop().size
        return None

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.setdefault(block.size, []).append(block)

    def _new_block(self, size: int) -> _Block | None:
        """None: it cannot be had, or the driver does not register it."""
        try:
            block = _Block(size)
        except OSError:
            return None
        if not block.register():
            return None
        with self._lock:
            self._num_bytes += size
        return block


def _give_back(memory: weakref.ref[PinnedMemory], block: _Block) -> None:
    """An image has gone; if the memory has as well, so does the block."""
    if (owner := memory()) is not None:
        owner._returned.append(block)


class _Block:
    """A mapping whose memory is let go, and unmapped, when the block goes."""

    def __init__(self, size: int) -> None:
        """Raises: OSError: there is no memory."""
        self.size = size
        spare = _HUGE_PAGE if size >= _HUGE_PAGE else 0  # addresses only: nothing is kept where nothing is written
        mapping = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if spare:
            with suppress(OSError):  # a system without
                mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(mapping, dtype=np.uint8)
        first = -memory.ctypes.data % _HUGE_PAGE if spare else 0
        self._memory = memory[first : first + size]

    def window(self, num_bytes: int) -> np.ndarray:
        """The first bytes, as an array that nobody else refers to."""
        return self._memory[:num_bytes]

    def register(self) -> bool:
        """Returns: whether the driver does so."""
        self._memory[:: mmap.PAGESIZE] = 0  # it is to find all of it there
        runtime, first = torch.cuda.cudart(), self._memory.ctypes.data  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(first, self.size, 0)) != 0:
            _forget_error()
            return False
        weakref.finalize(self, _let_go, runtime.cudaHostUnregister, first, self._memory).atexit = False
        return True


def block_size(num_bytes: int) -> int:
    """Bytes of the block for an image of so many."""
    grain = max(mmap.PAGESIZE, (1 << num_bytes.bit_length() - 1) // _GRAINS)
    return -(-num_bytes // grain) * grain


def _let_go(unregister: Callable[[int], object], first: int, memory: np.ndarray) -> None:
    """Args: memory: is unmapped no sooner than this has returned."""
    unregister(first)


def _forget_error() -> None:
    """Take away what a refusal has left behind: CUDA's runtime keeps a thread's last error until somebody asks, and
    torch asks after its next launch, which would seem to have failed.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
