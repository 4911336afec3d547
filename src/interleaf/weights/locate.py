"""Where a model lies: a path, or the hub's copy of it. Imports no torch, for whoever wants only a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from interleaf.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
_HUB_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def resolve_model(model: str, *, with_weights: bool = True) -> Path:
    """The local path of a model; what looks like a hub id and is no path is downloaded (or found in the hub's cache).

    Args:
        with_weights: without, only configuration and tokenizer are downloaded.

    Raises: CheckpointError: there is no such path, and no such model on the hub or no way to reach it.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(model) or path.suffix.lower() in (".gguf", ".json", ".safetensors"):
        raise CheckpointError(f'{model}: no such file or folder, and not a hub id of the form "owner/name"')
    from huggingface_hub import snapshot_download

    files = [*_HUB_CONFIG_FILES, *(_HUB_WEIGHT_FILES if with_weights else ())]
    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except Exception as e:  # the hub's client and its transport raise unrelated types; all mean the same to the caller
        reason = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
        raise CheckpointError(f"{model}: no such path, and it cannot be had from the hub ({reason})") from e
