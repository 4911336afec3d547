"""Runs a coroutine as a test, on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

LIMIT_S = 240.0
"""Longest that one test may take: what hangs is a failure with a traceback of where it hung.

Beyond any wait of a test (`waiting.WAIT_S`), within the limit of pyproject.toml.
"""


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates a test that is a coroutine function; its fixtures are those of any other test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run
