"""What to say of a name that is no setting: the nearest one, or ours for what vLLM calls so. Knows no value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_ELSEWHERE = {
    "gpu_memory_utilization": "memory, a share of the GPU's memory",
    "lora_modules": "adapters (--adapter NAME=PATH)",
    "enable_lora": "not needed: adapters may always be used",
    "max_loras": "not needed: adapters in use are bounded by the pool's pages",
    "max_lora_rank": "not needed: any rank is taken",
    "max_cpu_loras": "adapter_host_memory, in bytes",
    "enable_prefix_caching": "prefix_cache",
    "swap_space": "swap_memory",
    "block_size": "page_tokens",
    "max_num_batched_tokens": "max_batch_tokens",
}
"""vLLM's names of what we call otherwise."""


def unknown_setting(key: str, known: Sequence[str]) -> str:
    """Say that `key` is unknown, and name the nearest known one."""
    if key in _ELSEWHERE:
        return f"unknown setting {key!r}: here it is {_ELSEWHERE[key]}"
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")
