"""From bytes on disk to named tensors. Knows file formats, not what a model does with its tensors.

The names are imported when they are first used: a process that makes text takes `locate` and `gguf_file` from this
package, and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interleaf.weights.checkpoint import Checkpoint, expect, open_checkpoint
    from interleaf.weights.locate import resolve_model

__all__ = ["Checkpoint", "expect", "open_checkpoint", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "locate" if name == "resolve_model" else "checkpoint"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
