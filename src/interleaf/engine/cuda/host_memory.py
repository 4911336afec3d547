"""Host memory that a GPU copies to and from of its own accord. Knows bytes, not what they hold.

torch's own pinned memory comes in powers of two: a budget of 5 GiB would take 8.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from interleaf.errors import ConfigError


def registered(name: str, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, registered with the driver; all of it is there when this returns, and goes with the tensor.

    Args: name: of the setting that asks for it.
    Raises: ConfigError: it cannot be had.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: {num_bytes} bytes of host memory cannot be had: {error}") from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if code != 0:
        raise ConfigError(
            f"{name}: the driver does not register {num_bytes} bytes of host memory (error {code}): give less, or 0"
        )
    # The callback runs before the tensor gives its memory back.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
