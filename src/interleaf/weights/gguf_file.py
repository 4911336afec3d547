"""One GGUF file: its metadata, and its tensors as they are stored. Knows no model; imports no torch.

The `gguf` library parses. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from interleaf.errors import CheckpointError


class GgufFile:
    """A parsed GGUF file, mapped.

    Raises: CheckpointError: the file is no GGUF file, is truncated, or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as e:  # on damaged files the library raises whatever numpy and its own enums do
            raise CheckpointError(f"{path}: is not a whole GGUF file ({type(e).__name__}: {e})") from e
        if (parts := self.get("split.count", 1)) > 1:
            raise CheckpointError(f"{path}: is one of {parts} parts; join them (gguf-split --merge) first")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: a number, a string, a bool, or a list of those."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def with_prefix(self, prefix: str) -> dict[str, Any]:
        """The metadata whose keys begin with `prefix`, which is taken off."""
        return {key.removeprefix(prefix): self.get(key) for key in self._reader.fields if key.startswith(prefix)}

    def tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {t.name: t for t in self._reader.tensors}


class _Reader(gguf.GGUFReader):
    """The library's reader on a plain array: a slice of a memmap is another memmap, and a vocabulary is 10^5 slices."""

    @property  # type: ignore[override]  # the library declares a memmap, and reads it as the array that it is
    def data(self) -> np.ndarray[Any, Any]:
        return self._flat

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._flat = np.asarray(mapped)
