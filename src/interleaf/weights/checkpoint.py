"""What a checkpoint offers, and which reader fits what lies at a path. Reads no tensor itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from interleaf.config import LoadFormat
from interleaf.errors import CheckpointError
from interleaf.weights.dummy import DummyCheckpoint
from interleaf.weights.gguf import GgufCheckpoint
from interleaf.weights.loader import SafetensorsCheckpoint
from interleaf.weights.locate import resolve_model


class Checkpoint(Protocol):
    """Named tensors of one model, read on demand. Whoever opens it closes it.

    Names are those that Hugging Face gives the Llama family: `model.embed_tokens.weight`,
    `model.layers.3.self_attn.q_proj.weight`, `model.norm.weight`, `lm_head.weight`.
    """

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json; the key "generation_config" holds generation_config.json where there is one."""

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are kept in: float32, float16 or bfloat16; float32 if they are quantised."""

    def names(self) -> frozenset[str]:
        """Every tensor that `get` can return."""

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        """One tensor, or some rows (axis 0) and columns (axis 1) of it.

        Returns: a tensor of the stored values, exactly, in float32, float16 or bfloat16; not necessarily `dtype`.
        Raises: CheckpointError: there is no such tensor, or its bytes cannot be read.
        """

    def close(self) -> None:
        """Let go of the files. Tensors already returned stay valid."""


def expect(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One whole tensor of that shape. Raises: CheckpointError: it is missing, or its shape is another."""
    tensor = checkpoint.get(name)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the configuration asks for {list(shape)}")
    return tensor


def open_checkpoint(model: str, load_format: LoadFormat = "auto", seed: int = 0) -> Checkpoint:
    """Open the model at a path or hub id.

    Args:
        model: a folder of config.json and safetensors, a .gguf file, or an id "owner/name" of the Hugging Face hub;
            for "dummy" also a config.json alone.
        load_format: "auto" goes by what lies there; "dummy" reads the configuration only.
        seed: of dummy weights.

    Raises: CheckpointError: nothing is there, or it is not a checkpoint of that format.
    """
    path = resolve_model(model, with_weights=load_format != "dummy")
    if load_format == "dummy":
        return DummyCheckpoint(path, seed)
    is_gguf = path.suffix.lower() == ".gguf"
    if load_format != "auto" and (load_format == "gguf") != is_gguf:
        raise CheckpointError(f"{path}: is not what load_format={load_format!r} reads")
    return GgufCheckpoint(path) if is_gguf else SafetensorsCheckpoint(path)
