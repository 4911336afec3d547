"""How long tests wait. Knows no server: whoever waits says what for.

The verdict of a test must not depend on how busy the machine is. So a test waits for what must come true, not for a
moment, and its limit is far beyond what the slowest machine needs: only what never comes true reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 120.0
"""For one thing to come true. A test as a whole has the longer limit of pyproject.toml."""

FILE_OF_TESTS_S = 1200.0
"""For a test that runs a file of tests in a process of their own, each of which has its own limit."""


def eventually(holds: Callable[[], object]) -> None:
    """Return when something holds. Raises: AssertionError: it has not come true."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "this has not come true"
        time.sleep(0.02)
