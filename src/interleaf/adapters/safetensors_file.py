"""Reads one safetensors file that may be truncated or lie about itself. Knows the format, nothing of adapters.

The safetensors library maps a file and hands out views of the map: a file cut short meanwhile kills the process
(SIGBUS), one overwritten meanwhile changes tensors that were checked already. Adapter folders are other people's and
are read while the engine serves, so here bytes are copied by ordinary reads, and every claim of the header is checked
first. Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from interleaf.adapters.json_file import Unreadable, parse_object, regular_size
from interleaf.adapters.problems import shown

_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

_MAX_DIMS = 8

_ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_ITEM_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
_ITEM_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The element types that `read` returns."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says about one tensor; `first` is its offset in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file whose header has been found true: entries fill it exactly, without overlap."""

    path: Path
    entries: dict[str, TensorEntry]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied.

        Raises: Unreadable: the file ends earlier than it did when its header was checked, or cannot be read.
        """
        entry = self.entries[name]
        buffer = bytearray(entry.num_bytes)
        view, done = memoryview(buffer), 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                while done < len(buffer) and (count := os.preadv(descriptor, [view[done:]], entry.first + done)):
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Unreadable(f"{self.path.name} cannot be read: {os.strerror(error.errno or 0)}") from None
        if done < len(buffer):
            raise Unreadable(f"{self.path.name} changed while it was read: {shown(name)} is cut short")
        return torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read and check a file's header.

    Raises: Unreadable: no regular file, or the header is cut short, too large, no JSON object, names an unknown dtype
        or a malformed shape, or its offsets overlap, leave gaps, contradict a shape or do not end where the file does.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise Unreadable(f"{path.name} has {size} bytes: too short for a safetensors header")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise Unreadable(
                    f"{path.name} claims a header of {header_bytes} bytes and has {size} bytes "
                    "(truncated, or no safetensors file)"
                )
            header = parse_object(file.read(header_bytes), f"the header of {path.name}")
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {os.strerror(error.errno or 0)}") from None
    header.pop("__metadata__", None)
    data_first = 8 + header_bytes
    entries = {name: _entry(path.name, name, claim, data_first) for name, claim in header.items()}
    end = data_first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].num_bytes)):
        if entry.first != end:
            what = "overlaps another tensor" if entry.first < end else "leaves a gap before it"
            raise Unreadable(f"{path.name}: {shown(name)} {what} at byte {entry.first - data_first}")
        end += entry.num_bytes
    if end != size:
        raise Unreadable(f"{path.name} has {size} bytes and its header describes {end} (truncated, or a false header)")
    return SafetensorsFile(path, entries)


def _entry(file: str, name: str, claim: Any, data_first: int) -> TensorEntry:
    where = f"{file}: {shown(name)}"
    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise Unreadable(f"{where} must be described by dtype, shape and data_offsets, got {shown(claim)}")
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise Unreadable(f"{where} has the unknown dtype {shown(dtype)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise Unreadable(f"{where} has the malformed shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise Unreadable(f"{where} has the malformed data_offsets {shown(offsets)}")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes * 8 != prod(shape) * _ITEM_BITS[dtype]:
        raise Unreadable(f"{where} has {num_bytes} bytes, which is not shape {shown(shape)} of {dtype}")
    return TensorEntry(dtype, tuple(shape), data_first + offsets[0], num_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
