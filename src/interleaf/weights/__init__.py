"""From bytes on disk to named tensors. Knows file formats, not what a model does with its tensors."""

from interleaf.weights.checkpoint import Checkpoint, expect, open_checkpoint, resolve_model

__all__ = ["Checkpoint", "expect", "open_checkpoint", "resolve_model"]
