"""Where an adapter stands that sequences wait for. Knows no sequence and no page."""

from __future__ import annotations

from enum import Enum


class Standing(Enum):
    """READY: it is in the pool, or there is none. COLD: it must be sent for. FETCHING: it is on its way to host memory,
    and has to be asked about in every plan; ASKED: it was. LOADING: it is on its way to the pool.
    """

    READY = "ready"
    COLD = "cold"
    FETCHING = "fetching"
    ASKED = "asked"
    LOADING = "loading"
