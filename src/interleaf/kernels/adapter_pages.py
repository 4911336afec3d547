"""Page lists of adapters on the device. Knows lists of numbers; not what the pages hold.

Graphs read them where they are: once made, the memory stays. A list is kept in a block of a power of two of entries,
and blocks of a size are used again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from interleaf.kernels.uploads import Uploads


class AdapterPages:
    """Room for so many entries.

    Attributes:
        data: int32, on the device.
    """

    def __init__(self, entries: int, device: torch.device, uploads: Uploads) -> None:
        self._uploads = uploads
        self.data = torch.zeros(entries, dtype=torch.int32, device=device)
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def put(self, pages: Sequence[int]) -> int | None:
        """Copy a list there, in the order of the current stream; returns its first entry, None if there is no room."""
        size = _block(len(pages))
        if self._free[size]:
            first = self._free[size].pop()
        elif self._used + size <= len(self.data):
            first = self._used
            self._used += size
        else:
            return None
        if len(pages):
            self._uploads.send(np.array(pages, dtype=np.int32), self.data[first : first + len(pages)])
        return first

    def take_back(self, first: int, count: int) -> None:
        """Its block is free. Steps enqueued before still find the list."""
        self._free[_block(count)].append(first)


def _block(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
