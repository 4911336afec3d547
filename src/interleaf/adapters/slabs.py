"""Images that another process has laid out: files mapped into memory. Parses, hashes and scales nothing.

    publisher: write_slab ──▶ file ──▶ engine: map it, unlink it

A slab is a header, then the image's bytes from the next multiple of 4096. It has a name only until it has been mapped:
from then on its memory belongs to the mapping, and whatever kills either process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from interleaf.adapters.host_tier import HostEntry, HostTier
from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterUid, PooledLayout
from interleaf.errors import AdapterLoadFailed
from interleaf.memory.geometry import PageGeometry

SUFFIX = ".slab"
_ALIGNMENT = 4096
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 64 * 2**20


class _Header(msgspec.Struct, frozen=True, array_like=True):
    uid: AdapterUid
    source: str
    layout: PooledLayout
    dtype: str


def write_slab(folder: Path, uid: AdapterUid, source: str, image: AdapterImage) -> Path:
    """Write an image, and what it was made of, where another process can map it. Returns: a new file.

    Raises: AdapterLoadFailed: the folder has no room; nothing is left there.
    """
    header = msgspec.msgpack.encode(_Header(uid, source, image.layout, str(image.data.dtype)))
    path = None
    try:
        descriptor, name = tempfile.mkstemp(SUFFIX, f"{uid[:12]}-", folder)
        path = Path(name)
        with open(descriptor, "wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            file.seek(_first_byte(len(header)))
            file.write(image.data.contiguous().view(torch.uint8).numpy().data)
    except OSError as error:
        if path is not None:
            path.unlink(missing_ok=True)
        raise AdapterLoadFailed(
            uid, f"its {image.num_bytes} bytes could not be written to {folder}: {error}"
        ) from error
    return path


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """An image that another process has written.

    Attributes:
        source: what it was made of, and can be made of again.
    """

    uid: AdapterUid
    source: str
    image: AdapterImage


def map_slab(path: str, geometry: PageGeometry, dtype: torch.dtype) -> Slab:
    """Map a slab, and take its name away.

    Raises: AdapterLoadFailed: it is not there, or is not a slab of this geometry.
    """
    try:
        with open(path, "rb+") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size, _MAX_HEADER_BYTES):
                raise AdapterLoadFailed(AdapterUid(Path(path).stem), f"{path} is not a slab")
            header = msgspec.msgpack.decode(file.read(length), type=_Header)
            shape = (header.layout.pages, geometry.num_layers, geometry.lane_elems)
            elems, first = shape[0] * shape[1] * shape[2], _first_byte(length)
            if header.dtype != str(dtype) or (elems and size != first + elems * dtype.itemsize):
                raise AdapterLoadFailed(header.uid, f"{path} holds {size} bytes of {header.dtype}, not {shape} {dtype}")
            if not elems:
                data = torch.zeros(shape, dtype=dtype)
            else:
                # Shared with the file; torch keeps the mapping for as long as a tensor looks at it.
                mapping = mmap.mmap(file.fileno(), size)
                data = torch.frombuffer(mapping, dtype=dtype, count=elems, offset=first).view(shape)
        os.unlink(path)
    except (OSError, msgspec.MsgspecError) as error:
        raise AdapterLoadFailed(AdapterUid(Path(path).stem), f"its slab {path} could not be mapped: {error}") from error
    return Slab(header.uid, header.source, AdapterImage(header.layout, data))


class SlabStore(HostTier):
    """Adapters of one rank, laid out elsewhere.

    Args:
        budget_bytes: of slabs that are mapped.
        ask: has a slab made again of a source, and does not wait; `arrived` is called with it, or with why not.
        prepare: what is done to an image before it is kept, such as registering its memory with a device's driver.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        dtype: torch.dtype,
        budget_bytes: int,
        ask: Callable[[AdapterUid, str], None],
        *,
        prepare: Callable[[AdapterImage], AdapterImage] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(budget_bytes, now=now)
        self._prepare = prepare
        self._geometry = geometry
        self._dtype = dtype
        self._ask = ask
        self._asked: dict[AdapterUid, list[HostEntry]] = {}  # one that was removed and came back is there twice

    def add(self, source: str) -> AdapterUid:
        """Map the slab at a path. Raises: AdapterLoadFailed: there is none."""
        slab = self._map(source)
        self._register(slab.uid, slab.source, slab.image)
        return slab.uid

    def arrived(self, uid: AdapterUid, slab: str | None, failure: str | None) -> None:
        """What was asked for has come; nobody may want it any more."""
        image = None
        if slab is not None:
            try:
                mapped = self._map(slab)
                assert mapped.uid == uid, f"slab of {mapped.uid} for {uid}"
                image = mapped.image
            except AdapterLoadFailed as error:
                failure = error.reason
        with self._lock:
            for entry in self._asked.pop(uid, []):
                self._arrived(uid, entry, image, failure)

    def _map(self, path: str) -> Slab:
        slab = map_slab(path, self._geometry, self._dtype)
        return slab if self._prepare is None else replace(slab, image=self._prepare(slab.image))

    def asked(self) -> list[tuple[AdapterUid, str]]:
        """What has been asked for and has not arrived: whoever makes slabs may have died meanwhile."""
        with self._lock:
            return [(uid, entries[-1].sources[0]) for uid, entries in self._asked.items()]

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Return at once: slabs arrive through the thread that would wait here."""

    def _fetch(self, uid: AdapterUid, entry: HostEntry) -> None:
        self._asked.setdefault(uid, []).append(entry)
        self._ask(uid, entry.sources[0])


def _first_byte(header_bytes: int) -> int:
    """Where the image begins."""
    return -(-(_LENGTH_BYTES + header_bytes) // _ALIGNMENT) * _ALIGNMENT
