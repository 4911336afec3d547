"""Reads one safetensors file that may be truncated or lie about itself. Knows the format, nothing of adapters.

The safetensors library maps a file and hands out views of the map: a file cut short meanwhile kills the process
(SIGBUS), one overwritten meanwhile changes tensors that were checked already. Adapter folders are other people's and
are read while the engine serves, so here bytes are copied by ordinary reads, and every claim of the header is checked
first. Source: the format's description, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interleaf.adapters.json_file import Unreadable, parse_object, regular_size
from interleaf.adapters.parsed import largest
from interleaf.adapters.problems import shown

_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

_MAX_DIMS = 8

_ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_ITEM_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
_ITEM_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

_CLAIMS = {"dtype", "shape", "data_offsets"}

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The element types that can be read."""

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.int16),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says about one tensor; `first` is its offset in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file whose header has been found true: entries fill it exactly, without overlap.

    Attributes:
        data_first: byte at which the tensors begin.
        num_bytes: of the file.
    """

    path: Path
    entries: dict[str, TensorEntry]
    data_first: int
    num_bytes: int

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied.

        Raises: Unreadable: the file ends earlier than it did when its header was checked, or cannot be read.
        """
        entry = self.entries[name]
        memory = self._read(entry.first, entry.num_bytes)
        if memory is None:
            raise Unreadable(f"{self.path.name} changed while it was read: {shown(name)} is cut short")
        return _tensor(memory, entry, 0)

    def read_all(self) -> tuple[dict[str, torch.Tensor], float] | None:
        """All tensors, copied in one go to one piece of memory, and the largest magnitude in them: NaN or infinite if
        any value is, NaN for tensors of several dtypes, of which each must be asked. None: they cannot be had whole.
        """
        try:
            memory = self._read(self.data_first, self.num_bytes - self.data_first)
        except Unreadable:
            return None
        if memory is None:
            return None
        first, dtypes = self.data_first, {entry.dtype for entry in self.entries.values()}
        tensors = {name: _tensor(memory, entry, entry.first - first) for name, entry in self.entries.items()}
        if len(dtypes) != 1:
            return tensors, math.nan
        return tensors, largest(torch.frombuffer(memory, dtype=TORCH_DTYPES[dtypes.pop()]))

    def _read(self, first: int, num_bytes: int) -> NDArray[np.uint8] | None:
        """A copy of a part of the file; None if the file ends before. Raises: Unreadable: it cannot be read."""
        memory = np.empty(num_bytes, np.uint8)  # in large pages, where there are any
        view, done = memory.data, 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                while done < num_bytes and (count := os.preadv(descriptor, [view[done:]], first + done)):
                    done += count
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Unreadable(f"{self.path.name} cannot be read: {os.strerror(error.errno or 0)}") from None
        return memory if done == num_bytes else None


def _tensor(memory: NDArray[np.uint8], entry: TensorEntry, offset: int) -> torch.Tensor:
    """The tensor that begins at that byte; a copy only if its elements lie across their natural borders."""
    dtype = _NUMPY_DTYPES[entry.dtype]
    values = np.frombuffer(memory, dtype, entry.num_bytes // dtype.itemsize, offset).reshape(entry.shape)
    tensor = torch.from_numpy(values if offset % dtype.itemsize == 0 else values.copy())
    return tensor.view(torch.bfloat16) if entry.dtype == "BF16" else tensor


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
    return SafetensorsFile(path, entries, data_first, size)


def _entry(file: str, name: str, claim: Any, data_first: int) -> TensorEntry:
    if not isinstance(claim, dict) or claim.keys() != _CLAIMS:
        raise _malformed(file, name, f"must be described by dtype, shape and data_offsets, got {shown(claim)}")
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise _malformed(file, name, f"has the unknown dtype {shown(dtype)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise _malformed(file, name, f"has the malformed shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _malformed(file, name, f"has the malformed data_offsets {shown(offsets)}")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
        raise _malformed(file, name, f"has {num_bytes} bytes, which is not shape {shown(shape)} of {dtype}")
    return TensorEntry(dtype, tuple(shape), data_first + offsets[0], num_bytes)


def _malformed(file: str, name: str, what: str) -> Unreadable:
    return Unreadable(f"{file}: {shown(name)} {what}")


def _are_counts(value: Any) -> bool:
    # By type: true is an int, too.
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
