"""Registers images' memory with the GPU's driver, so that copies run at the speed of the link. Knows no adapter.

An image is moved first, to a mapping of its own made of huge pages, for two reasons. The driver registers whole memory
pages, none of them twice, so that an image must not share one with anything. And it holds up every launch while it
goes through them: 3.6 ms for 20 MB of a slab's small pages, which showed in the step times, but nothing that could be
measured for huge pages that are there already (docs/benchmarks/h200/engine.md).
Memory is let go when the last tensor that owns it goes.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from interleaf.adapters.image import AdapterImage

_HUGE_PAGE = 2**21


def pin(image: AdapterImage) -> AdapterImage:
    """Register an image's memory. Where the driver refuses, the image stays as it is: its copies are slower, no more.

    Returns: the image elsewhere.
    """
    if not image.num_bytes or image.data.is_pinned():
        return image
    try:
        data = _moved(image.data)
    except OSError:  # no memory for another one
        return image
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)) != 0:
        _forget_error()
        return image
    # The callback runs before the tensor gives its memory back.
    weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
    return replace(image, data=data)


def _moved(data: torch.Tensor) -> torch.Tensor:
    """A copy in memory pages of its own, which go with it: huge ones, as far as it fills them and the system can."""
    num_bytes = data.nbytes
    spare = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 0  # addresses only: nothing is kept where nothing is written
    mapping = mmap.mmap(-1, num_bytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if spare:
        first = -memory.data_ptr() % _HUGE_PAGE
        memory = memory[first : first + num_bytes]
        with suppress(OSError):  # a system without
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # By numpy: the other threads go on, and none of torch's joins in.
    np.copyto(memory.numpy(), data.reshape(-1).view(torch.uint8).numpy())
    return memory.view(data.dtype).view(data.shape)


def _forget_error() -> None:
    """Take away what a refusal has left behind: CUDA's runtime keeps a thread's last error until somebody asks, and
    torch asks after its next launch, which would seem to have failed.
    """
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
