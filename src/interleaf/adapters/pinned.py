"""Registers images' memory with the GPU's driver, so that copies run at the speed of the link. Knows no adapter.

The driver registers whole memory pages, none of them twice, and refuses to copy from memory of which it has registered
a part. So an image must not share a page with anything: one that has a mapping for itself (a slab of another process)
is registered where it lies, any other is moved to one first. Memory is let go when the last tensor that owns it goes.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from dataclasses import replace

import torch

from interleaf.adapters.image import AdapterImage


def pin(image: AdapterImage) -> AdapterImage:
    """Register an image's memory. Where the driver refuses, the image stays as it is: its copies are slower, no more.

    Returns: the image, perhaps elsewhere.
    """
    data = image.data
    if not data.nbytes or data.is_pinned():
        return image
    if data.data_ptr() % mmap.PAGESIZE or data.nbytes % mmap.PAGESIZE:
        try:
            data = _moved(data)
        except OSError:  # no memory for another one
            return image
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)) != 0:
        _forget_error()
        return image
    # The callback runs before the tensor gives its memory back.
    weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
    return image if data is image.data else replace(image, data=data)


def _moved(data: torch.Tensor) -> torch.Tensor:
    """A copy in memory pages of its own, which go with it."""
    mapping = mmap.mmap(-1, data.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=data.dtype, count=data.numel()).view(data.shape).copy_(data)


def _forget_error() -> None:
    """Take away what a refusal has left behind: CUDA's runtime keeps a thread's last error until somebody asks, and
    torch asks after its next launch, which would seem to have failed.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
