"""The disk tier: images that have left host memory, as files of one folder within a byte budget. Parses no adapter.

    host memory ──least recently used──▶ file named by uid and layout ──wanted again──▶ host memory
                                           │ over budget: deleted, the longest unused first

A file is written under another name and renamed when it is whole, and never changed after that: so several engines may
use one folder, each may delete what it likes, and whoever is killed leaves nothing that is ever read. A file's time of
modification is when an engine last had use for it, so that all of them agree on the order. The budget is the folder's.

The folder is a cache: whatever is wrong with it is logged, and the adapter made of its source again. What is under a
uid in it is believed if its digest fits, hence nobody else may write there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from interleaf.adapters.image import IMAGE_VERSION, AdapterImage
from interleaf.adapters.image_file import image_bytes, image_shape, make_header, read_header
from interleaf.adapters.json_file import Unreadable
from interleaf.core import AdapterUid, PooledLayout, StreamOrder
from interleaf.errors import ConfigError
from interleaf.memory.geometry import PageGeometry

SUFFIX = ".image"
_PART = ".part"
"""Suffix of a file that is being written; its writer holds a lock on it."""

_MAX_WAITING = 2
"""Images that are written or wait for it at a time. More would hold memory beyond the host tier's budget, and delay
what is to be read; one that finds no room is read from its source when it is wanted again."""

_SHORT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)

_PAUSE_S = 60.0
"""Nothing is written for so long after the folder has refused a file."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DiskCounts:
    """What the folder holds, as this engine knows it, and running totals.

    Attributes:
        hits: images that were read back.   writes: images that were written.
        errors: files that were damaged, or could not be read or written.
    """

    bytes: int = 0
    files: int = 0
    hits: int = 0
    writes: int = 0
    errors: int = 0


def open_folder(parent: str) -> Path:
    """The folder for this user's images below `parent`; both are made if they are missing.

    Raises: ConfigError: it cannot be used, or others may write to it.
    """
    folder = Path(parent) / f"interleaf-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ConfigError(f"adapter_disk_dir: {folder} is not a folder to which only this user may write")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"adapter_disk_dir={parent} cannot hold adapters: {error}") from None
    return folder


class DiskTier:
    """Images of one rank's layout in one folder. All methods may be called from any thread and wait for no disk.

    Args:
        folder: nobody else's (`open_folder`).
        budget_bytes: of all images in the folder, whoever wrote them.
        rank, world: which share of every layer the images hold.
        order: of their streams. Engines on a CPU and on a GPU may use one folder, each its own files.
        executor: where files are read and written, one after another; shut down by `close`.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        geometry: PageGeometry,
        dtype: torch.dtype,
        executor: Executor,
        *,
        rank: int = 0,
        world: int = 1,
        order: StreamOrder = StreamOrder.ROWS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._geometry = geometry
        self._dtype = dtype
        key = repr((IMAGE_VERSION, geometry, str(dtype), rank, world, order.value))
        self._key = hashlib.sha256(key.encode()).hexdigest()[:12]
        self._executor = executor
        self._now = now
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # names and bytes, the longest unused first
        self._seen_ns = -1  # when the folder had last changed as `_files` was made
        self._num_waiting = 0
        self._paused_until_s = 0.0
        self._counts = DiskCounts()
        self._remove_parts()
        self._look()
        self._make_room("", 0)  # an earlier engine may have had a larger budget

    @property
    def counts(self) -> DiskCounts:
        """As of now; a copy."""
        with self._lock:
            files, counts = self._files, self._counts
            return DiskCounts(sum(files.values()), len(files), counts.hits, counts.writes, counts.errors)

    def holds(self, uid: AdapterUid) -> bool:
        """Whether there was a file when somebody last looked."""
        with self._lock:
            return self._name(uid) in self._files

    def offer(self, uid: AdapterUid, leaving: list[AdapterImage]) -> None:
        """Have an image written that leaves host memory, unless its file is there or too many wait.

        Args:
            leaving: the image. It is taken out, and the last reference to it given up, on the executor's thread: to
                give back memory that a device knows takes long.
        """
        with self._lock:
            is_there = self._name(uid) in self._files
            takes = not is_there and self._num_waiting < _MAX_WAITING and self._now() >= self._paused_until_s
            self._num_waiting += takes
        if takes:
            self._submit(self._write, uid, leaving)
        else:
            self._submit(leaving.clear)
            if is_there:
                self._submit(self._use, self._name(uid))

    def fetch(self, uid: AdapterUid, layout: PooledLayout, then: Callable[[AdapterImage | None], None]) -> None:
        """Read an image back. `then` is called with it on the executor's thread, or with None: it cannot be had."""
        if not self._submit(lambda: then(self._read(uid, layout))):
            then(None)

    def discard(self, uid: AdapterUid) -> None:
        """The adapter is withdrawn: its file goes, behind all that was asked for before."""
        self._submit(self._delete, self._name(uid))

    def close(self) -> None:
        """Return when what was asked for has ended. The files stay, for whoever comes next."""
        self._executor.shutdown()

    # ------------------------------------------------------------------ on the executor's thread

    def _write(self, uid: AdapterUid, leaving: list[AdapterImage]) -> None:
        image, name = leaving.pop(), self._name(uid)
        try:
            header = make_header(uid, "", image)
            num_bytes = len(header) + image.num_bytes
            if self._make_room(name, num_bytes):
                with self._changing():
                    self._write_file(name, header, image)
                with self._lock:
                    self._files[name] = num_bytes
                    self._counts.writes += 1
        except OSError as error:
            self._refused(error)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _write_file(self, name: str, header: bytes, image: AdapterImage) -> None:
        descriptor, part = tempfile.mkstemp(_PART, f"{name}.", self._folder)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                with suppress(OSError):  # a file system without locks: what a killed engine leaves there stays
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for part_of_it in (header, image_bytes(image.data)):
                    left = memoryview(part_of_it)
                    while left:
                        left = left[file.write(left) :]
                os.rename(part, self._folder / name)  # while it is locked
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _refused(self, error: OSError) -> None:
        with self._lock:
            self._counts.errors += 1
            self._paused_until_s = self._now() + _PAUSE_S
        what = "no room is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        logger.warning(
            "adapter_disk_dir: an adapter could not be written to %s: %s; for %g s none is, and adapters that host "
            "memory has no room for are read from their sources again", self._folder, what, _PAUSE_S,
        )  # fmt: skip

    def _read(self, uid: AdapterUid, layout: PooledLayout) -> AdapterImage | None:
        name = self._name(uid)
        try:
            image = self._read_file(name, uid, layout)
        except FileNotFoundError:  # another engine has deleted it
            self._forget(name)
            return None
        except Exception as error:  # whoever waits is served from the source, whatever has happened
            # Where memory or descriptors are short, the file is innocent.
            is_bad = isinstance(error, Unreadable) or (isinstance(error, OSError) and error.errno not in _SHORT)
            if is_bad:
                self._delete(name)
            with self._lock:
                self._counts.errors += 1
            what = "is deleted" if is_bad else "cannot be read now"
            logger.warning("%s %s, and the adapter read from its source: %s", self._folder / name, what, error)
            return None
        self._use(name)
        with self._lock:
            self._counts.hits += 1
        return image

    def _read_file(self, name: str, uid: AdapterUid, layout: PooledLayout) -> AdapterImage:
        with open(self._folder / name, "rb", buffering=0) as file:
            header, first = read_header(file, os.fstat(file.fileno()).st_size, self._geometry, self._dtype)
            if (header.uid, header.layout) != (uid, layout):
                raise Unreadable(f"it holds adapter {header.uid[:12]} in another layout")
            shape = image_shape(layout, self._geometry)
            num_bytes = shape[0] * shape[1] * shape[2] * self._dtype.itemsize
            if not num_bytes:
                return AdapterImage(layout, torch.zeros(shape, dtype=self._dtype))
            # Pages of its own, which a device's driver can register where they lie, and which go with the image.
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            data = torch.frombuffer(memory, dtype=self._dtype).view(shape)
            file.seek(first)
            # In few, long calls: each of them lets the step loop's thread run, and then waits for it.
            done, whole = 0, memoryview(memory)
            while done < num_bytes:
                count = file.readinto(whole[done:])
                if not count:
                    raise Unreadable(f"it ends after {done} of the image's {num_bytes} bytes")
                done += count
        if hashlib.sha256(image_bytes(data)).digest() != header.digest:
            raise Unreadable("its bytes are not those that its digest was made of")
        return AdapterImage(layout, data)

    def _use(self, name: str) -> None:
        """It is the most recently used one."""
        try:
            os.utime(self._folder / name)
        except FileNotFoundError:
            self._forget(name)
        except OSError:
            pass  # other engines go by the use before: they may delete it sooner
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)

    def _make_room(self, name: str, num_bytes: int) -> bool:
        """Delete the longest unused until so many bytes fit.

        Returns: whether to write; False if it is there already, or larger than all that may be.
        """
        if self._changed_ns() != self._seen_ns:
            self._look()  # another engine has been at work
        with self._lock:
            left = self._budget_bytes - sum(self._files.values()) - num_bytes
            if name in self._files or num_bytes > self._budget_bytes:
                return False
            leaving: list[str] = []
            for other, size in self._files.items():
                if left >= 0:
                    break
                leaving.append(other)
                left += size
        for other in leaving:
            self._delete(other)
        return True

    def _delete(self, name: str) -> None:
        with self._changing(), suppress(OSError):
            os.unlink(self._folder / name)
        self._forget(name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The change to the folder is ours: no reason to look what it holds, unless there was one before."""
        is_seen = self._changed_ns() == self._seen_ns
        try:
            yield
        finally:
            if is_seen:
                self._seen_ns = self._changed_ns()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._files.pop(name, None)

    # ------------------------------------------------------------------ the folder

    def _look(self) -> None:
        """See what the folder holds."""
        self._seen_ns = self._changed_ns()
        found = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, entry.name, status.st_size))
        except OSError as error:
            logger.warning("adapter_disk_dir: %s cannot be listed: %s", self._folder, error)
        with self._lock:
            self._files = OrderedDict((name, size) for _, name, size in sorted(found))

    def _changed_ns(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:
            return -1

    def _remove_parts(self) -> None:
        """Remove what killed engines were writing: nobody holds a lock on it."""
        for part in self._folder.glob(f"*{_PART}"):
            with suppress(OSError), open(part, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(part)

    def _name(self, uid: AdapterUid) -> str:
        return f"{uid}-{self._key}{SUFFIX}"

    def _submit(self, call: Callable[..., object], *args: object) -> bool:
        """Returns: False, the tier is closed."""
        try:
            self._executor.submit(call, *args)
        except RuntimeError:
            return False
        return True
