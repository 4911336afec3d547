"""Images that another process has laid out: files mapped into memory. Parses, hashes and scales nothing.

    publisher: write_slab ──▶ file ──▶ engine: map it, unlink it

A slab (`image_file.py`) has a name only until it has been mapped: from then on its memory belongs to the mapping, and
whatever kills either process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from interleaf.adapters.disk_tier import DiskTier
from interleaf.adapters.host_tier import HostEntry, HostTier
from interleaf.adapters.image import AdapterImage, ImageDraft
from interleaf.adapters.image_file import ImageHeader, encode_header, image_bytes, image_shape, read_header
from interleaf.adapters.json_file import Unreadable
from interleaf.core import AdapterUid
from interleaf.errors import AdapterLoadFailed
from interleaf.memory.geometry import PageGeometry

SUFFIX = ".slab"

_MIN_WRITE_BYTES = 16 * 1024
"""Layers of one page are written together until they are so many: a call costs as much as copying a few KB."""


def write_slab(folder: Path, uid: AdapterUid, source: str, draft: ImageDraft) -> Path:
    """Make an image, and write it, and what it was made of, where another process can map it. Returns: a new file.

    Layers are written as they are made, while the processor's cache holds them: the whole image is nowhere but in the
    file. Its header comes last: without it, a file is no slab.

    Raises: AdapterLoadFailed: the folder has no room; nothing is left there.
    """
    path = None
    try:
        descriptor, name = tempfile.mkstemp(SUFFIX, f"{uid[:12]}-", folder)
        path = Path(name)
        try:
            header = encode_header(ImageHeader(uid, source, draft.layout, str(draft.dtype)))
            _write_image(descriptor, len(header), draft)
            _write(descriptor, memoryview(header), 0)
        finally:
            os.close(descriptor)
    except BaseException as error:
        if path is not None:
            path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise AdapterLoadFailed(
            uid, f"its {draft.num_bytes} bytes could not be written to {folder}: {error}"
        ) from error
    return path


def _write_image(descriptor: int, first: int, draft: ImageDraft) -> None:
    """Write an image from byte `first` on: a few layers of one page after the other, then the next layers."""
    pages, num_layers, lane_elems = draft.shape
    lane_bytes = lane_elems * draft.dtype.itemsize
    layers = min(num_layers, -(-_MIN_WRITE_BYTES // lane_bytes))
    for number, part in enumerate(draft.parts(layers)):
        at, data, page_bytes = first + number * layers * lane_bytes, image_bytes(part), part.shape[1] * lane_bytes
        for page in range(pages):
            _write(descriptor, data[page * page_bytes :][:page_bytes], at + page * num_layers * lane_bytes)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done


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
            header, first = read_header(file, size, geometry, dtype)
            shape = image_shape(header.layout, geometry)
            if not header.layout.pages:
                data = torch.zeros(shape, dtype=dtype)
            else:
                # Shared with the file; torch keeps the mapping for as long as a tensor looks at it.
                mapping = mmap.mmap(file.fileno(), size)
                data = torch.frombuffer(mapping, dtype=dtype, offset=first).view(shape)
        os.unlink(path)
    except (OSError, Unreadable) as error:
        raise AdapterLoadFailed(AdapterUid(Path(path).stem), f"its slab {path} could not be mapped: {error}") from error
    return Slab(header.uid, header.source, AdapterImage(header.layout, data))


class SlabStore(HostTier):
    """Adapters of one rank, laid out elsewhere.

    Args:
        budget_bytes: of slabs that are mapped.
        ask: has a slab made again of a source, and does not wait; `arrived` is called with it, or with why not.
            Called from any thread.
        on_arrival: called from any thread when an image has come, or has turned out not to.
        disk, prepare: see HostTier.
        executor: where images are prepared, and given up: both may take long. Until an image has been prepared its
            adapter is on its way. None: prepared where they come in. Shut down by `close`.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        dtype: torch.dtype,
        budget_bytes: int,
        ask: Callable[[AdapterUid, str], None],
        *,
        on_arrival: Callable[[], None] = lambda: None,
        disk: DiskTier | None = None,
        prepare: Callable[[AdapterImage], AdapterImage] | None = None,
        executor: Executor | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(budget_bytes, disk=disk, prepare=prepare, executor=executor, now=now)
        self._geometry = geometry
        self._dtype = dtype
        self._ask = ask
        self._on_arrival = on_arrival
        self._asked: dict[AdapterUid, list[HostEntry]] = {}  # one that was removed and came back is there twice

    def add(self, source: str) -> AdapterUid:
        """Map the slab at a path. Raises: AdapterLoadFailed: there is none."""
        slab = map_slab(source, self._geometry, self._dtype)
        with self._lock:
            entry = self._enter(slab.uid, slab.source, slab.image)
            if entry.image is not None:
                self._install(slab.uid, entry, entry.image)
                return slab.uid
            is_expected = not entry.fetching
            if is_expected:
                self._expect(entry)
        self._prepare_image(slab.image, lambda image: self._registered(slab.uid, entry, image, is_expected))
        return slab.uid

    def arrived(self, uid: AdapterUid, slab: str | None, failure: str | None) -> None:
        """What was asked for has come; nobody may want it any more."""
        with self._lock:
            entries = self._asked.pop(uid, [])

        def prepared(image: AdapterImage | None) -> None:
            for entry in entries:
                self._arrived(uid, entry, image, failure)

        if slab is not None:
            try:
                mapped = map_slab(slab, self._geometry, self._dtype)
                assert mapped.uid == uid, f"slab of {mapped.uid} for {uid}"
            except AdapterLoadFailed as error:
                failure = error.reason
            else:
                self._prepare_image(mapped.image, prepared)
                return
        prepared(None)

    def close(self) -> None:
        """Forget everything; return when what was begun has ended."""
        super().close()
        if self._executor is not None:
            self._executor.shutdown()

    def _prepare_image(self, image: AdapterImage, then: Callable[[AdapterImage], None]) -> None:
        """Call `then` with the image as it is to be kept."""
        if self._prepare is None:
            then(image)
            return
        waiting = [image]

        def run() -> None:
            then(self._prepared(waiting.pop()))

        if self._executor is None:
            run()
        else:
            with suppress(RuntimeError):  # it was shut down
                self._executor.submit(run)

    def _registered(self, uid: AdapterUid, entry: HostEntry, image: AdapterImage, is_expected: bool) -> None:
        """The image of an adapter that was added may be used from now on."""
        with self._lock:
            if is_expected:
                entry.fetching = False
                self._coming_bytes -= entry.num_bytes
            if self._entries.get(uid) is entry:
                self._install(uid, entry, image)
        self._on_arrival()

    def _arrived(self, uid: AdapterUid, entry: HostEntry, image: AdapterImage | None, failure: str | None) -> None:
        super()._arrived(uid, entry, image, failure)
        self._on_arrival()

    def asked(self) -> list[tuple[AdapterUid, str]]:
        """What has been asked for and has not arrived: whoever makes slabs may have died meanwhile."""
        with self._lock:
            return [(uid, entries[-1].sources[0]) for uid, entries in self._asked.items()]

    def wait_for_fetch(self, timeout_s: float) -> None:
        """Return at once: slabs arrive through the thread that would wait here."""

    def _fetch(self, uid: AdapterUid, entry: HostEntry) -> None:
        with self._lock:
            self._asked.setdefault(uid, []).append(entry)
        self._ask(uid, entry.sources[0])
