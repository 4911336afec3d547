"""Moves adapters' images into their pages and says when they are there. Decides nothing; chooses no page.

Two orderings must hold around a copy: a step must not read pages before their copy has ended, and a copy must not write
into recycled pages while a step still reads them. Here a copy is a plain one, made inside `copy` by the thread that
also executes steps, in the order of the plans: both hold because that thread does one thing after another. A device
with copy streams of its own needs events instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterLoad, AdapterUid, PooledLayout
from interleaf.errors import InterleafError
from interleaf.memory.pool import PagePool


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The end of one adapter's copy.

    Attributes:
        error: why the pages do not hold the adapter; None: later steps may read it.
    """

    uid: AdapterUid
    error: str | None = None


class AdapterCopier:
    """Copies into one pool. `copy` belongs to the thread that executes steps; `poll` may be called from another.

    Args:
        image: the image of an adapter that its caller keeps in memory until the copy is reported.
    """

    def __init__(self, pool: PagePool, image: Callable[[AdapterUid], AdapterImage]) -> None:
        self._pool = pool
        self._image = image
        self._ended: deque[LoadReport] = deque()

    def copy(self, load: AdapterLoad) -> PooledLayout | None:
        """Fill an adapter's pages, all layers of a page in one contiguous copy.

        Returns: where everything lies in them; None if the image could not be had, which `poll` then explains.
        """
        try:
            image = self._image(load.uid)
        except InterleafError as error:  # one adapter's trouble: the step goes on without it
            self._ended.append(LoadReport(load.uid, str(error)))
            return None
        assert image.layout.pages == len(load.pages), f"{image.layout.pages} pages of image for {len(load.pages)}"
        if load.pages:
            pages = torch.tensor(load.pages, device=self._pool.lanes.device)
            self._pool.lanes.index_copy_(0, pages, image.data)
        self._ended.append(LoadReport(load.uid))
        return image.layout

    def poll(self) -> list[LoadReport]:
        """Copies that have ended since the last call, in order."""
        return [self._ended.popleft() for _ in range(len(self._ended))]
