"""Which budgets of host memory are more than the machine has: a slip, or meant, so a warning. Allocates nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from interleaf.config import EngineConfig
from interleaf.server.option import shown_bytes

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """What the machine has, or what its container may take if that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no control groups, or "max": no limit
        found = min(found, int(_CONTAINER_LIMIT.read_text("ascii")))
    return found


def host_memory_warnings(config: EngineConfig, host_bytes: int) -> list[str]:
    """A line for each budget that alone is over `host_bytes`."""
    budgets = {"adapter_host_memory": config.adapter_host_memory_bytes, "swap_memory": config.swap_memory_bytes}
    if config.device == "cpu":
        budgets["memory"] = config.memory_bytes
    return [
        f"{name}={shown_bytes(num_bytes)} is more than the {host_bytes / 2**30:.1f}GiB of memory that this machine or "
        "its container has: once it is used, the server is killed"
        for name, num_bytes in budgets.items()
        if num_bytes > host_bytes
    ]
