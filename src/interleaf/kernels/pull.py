"""Copies host memory by a kernel that reads it over the bus. Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def pull(source, target, count, BLOCK: tl.constexpr):
    """target[:count] = source[:count].

    Args:
        source: int32, on the host, pinned. It is read anew, whatever a cache holds of it.
        target: int32, on the device.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    tl.store(target + i, tl.load(source + i, mask=inside, cache_modifier=".cv"), mask=inside)
