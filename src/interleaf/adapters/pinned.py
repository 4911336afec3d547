"""Memory registered with the GPU's driver, so that copies out of it run at the speed of the link. Knows no adapter.

Registering and letting go hold up every launch of the process meanwhile: 3.6 ms for the small pages of a slab of 20 MB,
2.6 to 4.8 ms to let them go (H200, docs/benchmarks/h200/engine.md). So neither happens as adapters come and go:

- images are moved to blocks, and a block whose image has gone takes the next one of its size. Only where many sizes
  change places in a full host tier do some blocks have to go for others;
- a block is a mapping of its own, for the driver registers whole pages and none of them twice, and of huge pages, which
  are there when it is registered: 0.6 ms at the median for 10 MB, which steps do not show.
"""

from __future__ import annotations

import itertools
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
"""Sizes of blocks between a power of two and the next: a block exceeds its image by a sixteenth, or a page, at most."""
_SPARE = 8
"""One in so many blocks' bytes may be without an image, so that sizes may change places."""


class PinnedMemory:
    """Blocks of registered memory, for images. `pin` may be called from any thread.

    Args:
        budget_bytes: of images. Of blocks there are an eighth more at most, or two of the largest, if it is little:
            beyond that, those that hold no image are let go, the longest without one first.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._most_bytes = budget_bytes + budget_bytes // _SPARE
        self._lock = Lock()
        # By size; in each, those longest without an image come first.
        self._free: dict[int, deque[_Block]] = {}
        # Appended to by whichever thread an image goes on, at whatever moment: without a lock.
        self._returned: deque[_Block] = deque()
        self._num_bytes = 0
        self._clock = itertools.count()

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
        block = self._block(block_size(data.nbytes))
        if block is None:
            return image
        target = block.window(data.nbytes)
        # torch keeps `target` for as long as any tensor looks at its memory.
        weakref.finalize(target, _give_back, weakref.ref(self), block).atexit = False
        # By numpy: the other threads go on meanwhile, and none of torch's joins in.
        np.copyto(target, data.reshape(-1).view(torch.uint8).numpy())
        return replace(image, data=torch.from_numpy(target).view(data.dtype).view(data.shape))

    def _block(self, size: int) -> _Block | None:
        """A block for an image; None: there is none to be had."""
        with self._lock:
            self._collect()
            if self._free.get(size):
                return self._free[size].pop()
            self._most_bytes = max(self._most_bytes, self._budget_bytes + 2 * size)
            leaving = self._leaving(self._most_bytes - size)
        leaving.clear()  # not under the lock: it may take long
        block = _new_block(size)
        if block is None:
            with self._lock:
                self._collect()
                leaving = self._leaving(0)
            if leaving:  # the driver may have had enough
                leaving.clear()
                block = _new_block(size)
        if block is not None:
            with self._lock:
                self._num_bytes += size
        return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.free_since = next(self._clock)
            self._free.setdefault(block.size, deque()).append(block)

    def _leaving(self, most_bytes: int) -> list[_Block]:
        """Take out free blocks until all are so many bytes at most, or none is free. They are let go with the list."""
        leaving: list[_Block] = []
        while self._num_bytes > most_bytes and (classes := [blocks for blocks in self._free.values() if blocks]):
            block = min(classes, key=lambda blocks: blocks[0].free_since).popleft()
            self._num_bytes -= block.size
            leaving.append(block)
        return leaving


def _give_back(memory: weakref.ref[PinnedMemory], block: _Block) -> None:
    """An image has gone; if the memory has as well, so does the block.

    Called on whatever thread, and wherever garbage is collected: maybe where this thread holds the lock already. If it
    is held, what is too much is let go another time.
    """
    owner = memory()
    if owner is None:
        return
    owner._returned.append(block)
    if owner._num_bytes > owner._most_bytes and owner._lock.acquire(blocking=False):
        try:
            owner._collect()
            leaving = owner._leaving(owner._most_bytes)
        finally:
            owner._lock.release()
        leaving.clear()


def _new_block(size: int) -> _Block | None:
    """None: it cannot be had, or the driver does not register it."""
    try:
        block = _Block(size)
    except OSError:
        return None
    return block if block.register() else None


class _Block:
    """A mapping whose memory is let go, and unmapped, when the block goes."""

    def __init__(self, size: int) -> None:
        """Raises: OSError: there is no memory."""
        self.size = size
        self.free_since = 0
        whole = size // _HUGE_PAGE * _HUGE_PAGE
        spare = _HUGE_PAGE if whole else 0  # addresses only: nothing is kept where nothing is written
        mapping = mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(mapping, dtype=np.uint8)
        first = -memory.ctypes.data % _HUGE_PAGE if spare else 0
        if whole:  # and not what is left: a huge page for it would take memory that nobody counts
            with suppress(OSError):  # a system without
                mapping.madvise(mmap.MADV_HUGEPAGE, first, whole)
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
