"""Registers images' memory with the GPU's driver, so that copies run at the speed of the link. Knows no adapter.

Memory is registered where it lies, slabs of another process too, and let go when the last tensor that owns it goes.
"""

from __future__ import annotations

import weakref

import torch

from interleaf.adapters.image import AdapterImage

_SMALLEST_BYTES = 2**20
"""Smaller images share memory pages with others, which cannot be registered twice; their copies are short anyway."""


def pin(image: AdapterImage) -> AdapterImage:
    """Register an image's memory. Where the driver refuses, the image stays as it is: its copies are slower, no more.

    Returns: `image`.
    """
    data = image.data
    if data.nbytes < _SMALLEST_BYTES or data.is_pinned():
        return image
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)) == 0:
        # The callback runs before the tensor gives its memory back.
        weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
    return image
