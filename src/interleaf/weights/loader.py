"""Hugging Face folders: config.json and safetensors, in one file or in shards named by an index. No pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from interleaf.errors import CheckpointError
from interleaf.weights.staging import DeviceReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_METADATA = "__metadata__"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: CheckpointError: it cannot be read, or is not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with generation_config.json (if any) under the key "generation_config"."""
    if not (folder / "config.json").is_file():
        hint = "; for a config.json alone, load_format must be dummy" if folder.is_file() else ""
        raise CheckpointError(f"{folder}: has no config.json{hint}")
    config = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        config["generation_config"] = read_json(folder / "generation_config.json")
    return config


class SafetensorsCheckpoint:
    """A folder of safetensors. Files are mapped: only the rows and columns asked for are read.

    Every header is checked on opening, so a missing, truncated or lying file is found before any weight is used.

    Raises: CheckpointError: names the file, or the tensor, and what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self.config: Mapping[str, Any] = read_config(folder)
        self._file_of = _read_index(folder)
        files = sorted(set(self._file_of.values())) or [SINGLE]
        self._handles = {file: _open(folder / file) for file in files}
        if not self._file_of:
            self._file_of = dict.fromkeys(self._handles[SINGLE].keys(), SINGLE)
        held = {file: frozenset(handle.keys()) for file, handle in self._handles.items()}
        for name, file in self._file_of.items():
            if name not in held[file]:
                raise CheckpointError(
                    f"{folder / file}: tensor {name} is missing, though {INDEX} says that it is there"
                )
        self.dtype = self._find_dtype(folder)
        self._folder = folder
        self._raw_files: dict[str, _RawFile] = {}
        self._reader: DeviceReader | None = None

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        source = self._slice(name)
        if source.get_dtype() not in _DTYPES:
            raise CheckpointError(f"tensor {name} is kept as {source.get_dtype()}, supported are {', '.join(_DTYPES)}")
        index = (rows or slice(None),) if cols is None else (rows or slice(None), cols)
        tensor: torch.Tensor = source[index]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return tuple(self._slice(name).get_shape())

    def fill(self, out: torch.Tensor, name: str, rows: slice | None = None, cols: slice | None = None) -> None:
        """`out` = get(name, rows, cols), converted to its dtype, without a copy of the whole in ordinary memory.

        Args: out: contiguous, on any device, of the shape that `get` would answer with.
        """
        source = self._slice(name)
        if source.get_dtype() not in _DTYPES:
            raise CheckpointError(f"tensor {name} is kept as {source.get_dtype()}, supported are {', '.join(_DTYPES)}")
        dtype, shape = _DTYPES[source.get_dtype()], self.shape(name)
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        is_direct = dtype == out.dtype and cols is None
        target = out if is_direct else out.new_empty((stop - start, *shape[1:]), dtype=dtype)
        if self._reader is None:
            self._reader = DeviceReader(out.device)
        file = self._file_of[name]
        if file not in self._raw_files:
            self._raw_files[file] = _open_raw(self._folder / file)
        raw = self._raw_files[file]
        row_bytes = target[:1].nbytes
        self._reader.read(raw.descriptor, raw.first_byte[name] + start * row_bytes, target)
        if not is_direct:
            out.copy_(target if cols is None else target[:, cols])

    def close(self) -> None:
        self._handles.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        while self._raw_files:
            os.close(self._raw_files.popitem()[1].descriptor)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        return self._handles[self._file_of[name]].get_slice(name)

    def _find_dtype(self, folder: Path) -> torch.dtype:
        # What lies on disk, not what config.json says: fine-tunes are often saved in another type than they declare.
        for name in ("model.embed_tokens.weight", *sorted(self._file_of)):
            if name in self._file_of and (dtype := _DTYPES.get(self._slice(name).get_dtype())):
                return dtype
        raise CheckpointError(f"{folder}: has no tensor of type {', '.join(_DTYPES)}")


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded model; empty for a model in one file."""
    if (folder / INDEX).is_file():
        entries = read_json(folder / INDEX).get("weight_map")
        if not isinstance(entries, dict) or not entries or not all(isinstance(f, str) for f in entries.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map must be an object of tensor and file names")
        for file in sorted(set(entries.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX}: {file!r} is not the name of a file in this folder")
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder / file}: is missing, though {INDEX} names it")
        return entries
    if not (folder / SINGLE).is_file():
        raise CheckpointError(_why_no_weights(folder))
    return {}


def _why_no_weights(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        return f"{folder}: has {pickles[0]} but no safetensors; pickled weights are not read, convert them first"
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    if ggufs:
        return f"{folder}: has no safetensors; to use {ggufs[0]}, give its own path"
    return f"{folder}: has neither {SINGLE} nor {INDEX}"


def _open(path: Path) -> Any:
    try:
        # The library checks that header, offsets and file size agree.
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: is not a whole safetensors file ({e})") from e


@dataclass(frozen=True, slots=True)
class _RawFile:
    """A file open for reading, and where in it each tensor begins."""

    descriptor: int
    first_byte: dict[str, int]


def _open_raw(path: Path) -> _RawFile:
    """The layout of a file that the library has found whole: a length, a JSON header of that length, the tensors."""
    descriptor = os.open(path, os.O_RDONLY)
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = json.loads(os.pread(descriptor, length, 8))
    first_byte = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != _METADATA}
    return _RawFile(descriptor, first_byte)
