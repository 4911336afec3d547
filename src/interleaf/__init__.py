"""Interleaf serves thousands of LoRA adapters from one base language model.

The public names are imported when they are first used, so that `import interleaf` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interleaf.core import FinishReason, SamplingParams, TokenLogprobs
    from interleaf.engine.llm import LLM
    from interleaf.engine.output import CompletionOutput, RequestOutput
    from interleaf.errors import InterleafError

__version__ = "0.1.0"

_HOMES = {
    "LLM": "interleaf.engine.llm",
    "CompletionOutput": "interleaf.engine.output",
    "FinishReason": "interleaf.core",
    "InterleafError": "interleaf.errors",
    "RequestOutput": "interleaf.engine.output",
    "SamplingParams": "interleaf.core",
    "TokenLogprobs": "interleaf.core",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "InterleafError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
