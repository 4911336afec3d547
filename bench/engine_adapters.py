"""Thousands of dummy adapters in host memory, laid out in seconds. Stands in for the host tier of an engine.

Nothing is parsed, scaled or permuted: an adapter's image is a window onto one stream of small random numbers, at a
place of its own. Kernels find in it matrices of the right sizes whose products stay small; no two adapters are equal.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.engine_rows import AdapterSet
from interleaf.adapters.host_tier import HostEntry, HostTier
from interleaf.adapters.image import AdapterImage, layout_of
from interleaf.core import AdapterUid, PooledLayout, StreamOrder
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard

_STD = 0.01
"""Of A and B. Beside a base weight of variance 1 / columns, B A x then is a twentieth of W x at most (4,096 columns and
rank 64), so hidden states stay what they are without adapters."""

_STEP_ELEMS = 64
"""Between the windows of two adapters: whole cache lines, so that copies are aligned."""

_BLOCK_BYTES = 2**30
_HUGE_PAGE_BYTES = 2**21
_PORTABLE = 1  # cudaHostRegisterPortable


class HostArena:
    """Memory for images, made once and handed out again for every row. Pinned, if a GPU is to copy from it.

    Args:
        pin: register every block with CUDA.
        block_bytes: images never cross a block, and blocks are what threads work on.
    """

    def __init__(self, *, pin: bool, block_bytes: int = _BLOCK_BYTES, threads: int | None = None) -> None:
        self._pin = pin
        self._block_bytes = block_bytes
        self._blocks: list[torch.Tensor] = []
        self._registered: list[int] = []
        self._threads = threads or min(12, len(os.sched_getaffinity(0)))

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def fill(self, windows: list[torch.Tensor]) -> list[torch.Tensor]:
        """A copy of every window, side by side in the arena. Earlier copies are overwritten."""
        placed: list[tuple[int, int]] = []  # block, first byte
        block, first = 0, 0
        left = sum(window.nbytes for window in windows)
        wanted: list[int] = [b.numel() for b in self._blocks]
        for window in windows:
            while block < len(wanted) and first + window.nbytes > wanted[block]:
                block, first = block + 1, 0
            if block == len(wanted):
                wanted.append(_round_up(max(window.nbytes, min(left, self._block_bytes))))
            placed.append((block, first))
            first += window.nbytes
            left -= window.nbytes
        self._blocks.extend(torch.empty(0, dtype=torch.uint8) for _ in wanted[len(self._blocks) :])
        by_block: list[list[int]] = [[] for _ in wanted]
        for index, (number, _) in enumerate(placed):
            by_block[number].append(index)
        copies: list[torch.Tensor] = [torch.empty(0)] * len(windows)

        def work(number: int) -> None:
            if self._blocks[number].numel() < wanted[number]:
                self._blocks[number] = self._new_block(wanted[number])
            for index in by_block[number]:
                window, at = windows[index], placed[index][1]
                copies[index] = self._blocks[number][at : at + window.nbytes].view(window.dtype)
                copies[index].copy_(window)

        with ThreadPoolExecutor(self._threads, "bench-images", torch.set_num_threads, (1,)) as pool:
            list(pool.map(work, range(len(wanted))))
        return copies

    def close(self) -> None:
        """Give the memory back."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._registered.clear()
        self._blocks.clear()

    def _new_block(self, num_bytes: int) -> torch.Tensor:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        if not self._pin:
            return block
        # By hand: torch's own pinned memory is never given back, and its blocks are rounded up to powers of two.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, _PORTABLE)) == 0:
            self._registered.append(block.data_ptr())
            return block
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


class BenchImages(HostTier):
    """A host tier whose images are all in memory, all the time. `add` takes the source of one that was laid out.

    An adapter that is registered again is another one to the engine: nothing that it may remember makes a run warm.

    Args:
        order: what the device's kernels read.
    """

    def __init__(
        self, shard: Shard, geometry: PageGeometry, dtype: torch.dtype, order: StreamOrder, arena: HostArena
    ) -> None:
        super().__init__(budget_bytes=2**62)
        self._shard = shard
        self._geometry = geometry
        self._dtype = dtype
        self._order = order
        self._arena = arena
        self._layouts: dict[tuple[str, int], PooledLayout] = {}
        self._made: dict[str, AdapterImage] = {}
        self._num_added = 0
        self._stream = torch.zeros(0, dtype=dtype)

    def layout_for(self, adapters: AdapterSet, index: int) -> PooledLayout:
        """Where the matrices of an adapter would lie; the same object for all that share it."""
        key = adapters.name, adapters.rank(index)
        if key not in self._layouts:
            ranks = {(layer, m): key[1] for layer in range(self._geometry.num_layers) for m in adapters.modules}
            self._layouts[key] = layout_of(ranks, self._shard, self._geometry, self._order)
        return self._layouts[key]

    def lay_out(self, adapters: AdapterSet, indices: Iterable[int]) -> dict[int, str]:
        """Make the images of some adapters of a set, in place of all that were made before.

        Returns: what to call `add` with, by index.
        """
        assert len(self) == 0, "images of registered adapters would be overwritten"
        indices = list(indices)
        layouts = [self.layout_for(adapters, index) for index in indices]
        elems = [layout.pages * self._geometry.page_elems for layout in layouts]
        self._grow_stream(max(elems, default=0) + _STEP_ELEMS * (max(indices, default=0) + 1))
        copies = self._arena.fill(
            [self._stream[_STEP_ELEMS * i : _STEP_ELEMS * i + n] for i, n in zip(indices, elems, strict=True)]
        )
        self._made.clear()
        sources = {}
        for index, layout, copy in zip(indices, layouts, copies, strict=True):
            data = copy.view(layout.pages, self._geometry.num_layers, self._geometry.lane_elems)
            sources[index] = f"bench:{adapters.name}:{index}"
            self._made[sources[index]] = AdapterImage(layout, data)
        return sources

    def add(self, source: str) -> AdapterUid:
        """Register an adapter that was laid out."""
        self._num_added += 1
        uid = AdapterUid(hashlib.sha256(f"{source} {self._num_added}".encode()).hexdigest())
        self._register(uid, source, self._made[source])
        return uid

    def used_bytes_by_uid(self) -> dict[AdapterUid, int]:
        """Bytes of A and B of every registered adapter."""
        return {uid: entry.layout.used_bytes for uid, entry in self._entries.items()}

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Return at once: nothing is ever fetched."""

    def _fetch(self, uid: AdapterUid, entry: HostEntry) -> None:
        raise AssertionError(f"the image of {uid} has left memory")

    def _grow_stream(self, elems: int) -> None:
        if len(self._stream) < elems:
            generator = torch.Generator().manual_seed(20231106)
            self._stream = (torch.randn(elems, generator=generator) * _STD).to(self._dtype)
