"""How many files this process may have open, which connections are. Knows no socket.

A process that has run out accepts nobody, and whoever waits is not told why: so the limit is raised as far as it goes,
and connections are refused before it is reached.
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

_RESERVE = 256
"""For everything else: files, sockets between processes, connections that were accepted and not counted yet."""

HEARD = 16384
"""Connections beyond those that are served, each for the time of one request's headers: they are told so, or asked
whether the server lives. One that is closed before its request was read may be reset before its answer is.
"""


def raise_limit(max_connections: int) -> None:
    """Take what the hard limit allows, for this process and those that it starts. Says so, and whether it is enough.

    Args:
        max_connections: those that one process is to serve.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            logger.info("limit of open files raised from %d to %s", soft, _shown(hard))
        except (OSError, ValueError) as error:  # some systems say "no limit" and do not mean it
            logger.info("limit of open files is %d and cannot be raised: %s", soft, error)
    if connections_at_most(max_connections) < max_connections:
        logger.warning(
            "max_connections=%d needs %d open files, %s are allowed (ulimit -n): connections over %d are refused",
            max_connections,
            max_connections + _RESERVE,
            _shown(_limit()),
            connections_at_most(max_connections),
        )


def connections_at_most(max_connections: int) -> int:
    """Connections that may be open at all: those that are served, and those that are heard, if so many files may be."""
    limit = _limit()
    wanted = max_connections + HEARD
    return wanted if limit == resource.RLIM_INFINITY else max(1, min(wanted, limit - _RESERVE))


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _shown(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)
