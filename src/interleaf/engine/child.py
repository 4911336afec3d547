"""How a process of this program begins and ends: settings in, a report out, and no life without its parent.

parent                              child
  │── Boot on its standard input ────▶│   the pipe stays open: its end is the parent's death
  │◀── Progress, then Started or ─────│
  │    StartFailed on a pipe          │
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from interleaf.engine.messages import Boot, Progress, Report, Started, StartFailed, WireError, encode
from interleaf.errors import InterleafError

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4

logger = logging.getLogger(__name__)
_REPORTS = msgspec.msgpack.Decoder(Report)


class Child:
    """A process that this one has started, with a session of its own: a Ctrl-C reaches only the parent.

    Attributes:
        name: for messages and logs.
        process: as `subprocess` has it.
    """

    def __init__(self, name: str, role: str, boot: Boot, inherited: Sequence[int] = ()) -> None:
        self.name = name
        self._reports, write_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "interleaf.engine.roles", role, str(write_end)],
            stdin=subprocess.PIPE,
            pass_fds=(write_end, *inherited),
            start_new_session=True,
        )
        os.close(write_end)
        assert self.process.stdin is not None
        data = encode(boot)
        with suppress(BrokenPipeError):  # it has died, which `wait_until_started` says
            self.process.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            self.process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def fileno(self) -> int:
        """Readable when it has reported something, or has ended."""
        return self._reports

    def wait_until_started(self, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> None:
        """Return when the child is ready. Raises: what kept it from starting; InterleafError: it has died."""
        while True:
            report = self._read()
            if isinstance(report, Started):
                if report.note:
                    logger.info("%s: %s", self.name, report.note)
                return
            if isinstance(report, Progress):
                progress(report.what, report.done, report.total)
                continue
            if isinstance(report, StartFailed):
                self.process.wait()
                raise report.error.exception()
            raise InterleafError(f"the {self.name} process ended before it was ready, with code {self.process.wait()}")

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def kill(self) -> None:
        """End it at once, and wait until it has."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Forget a child that has ended."""
        os.close(self._reports)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def _read(self) -> Report | None:
        length = _read_exactly(self._reports, _LENGTH_BYTES)
        data = None if length is None else _read_exactly(self._reports, int.from_bytes(length, "little"))
        return None if data is None else _REPORTS.decode(data)


class Parent:
    """The process that has started this one. Made once, first of all.

    Args:
        reports: file descriptor of the pipe for reports.
        on_death: run when the parent has died, before this process ends. Without one the kernel ends this process,
            where it can.
    """

    def __init__(self, reports: int, on_death: Callable[[Boot], None] | None = None) -> None:
        self._reports = reports
        os.set_inheritable(reports, False)
        length = _read_exactly(0, _LENGTH_BYTES)
        data = None if length is None else _read_exactly(0, int.from_bytes(length, "little"))
        if data is None:
            os._exit(1)
        self.boot = msgspec.msgpack.decode(data, type=Boot)
        if on_death is None and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._watch, args=(on_death,), name="parent-watch", daemon=True).start()

    def started(self, note: str = "") -> None:
        """This process is ready. The note becomes a line of the parent's log.

        What there is by now stays to the end, and no garbage collection looks at it again: a full one stops a process
        that has loaded torch for a tenth of a second or more.
        """
        gc.collect()
        gc.freeze()
        self._report(Started(note))

    def failed(self, error: BaseException) -> None:
        """This process cannot start."""
        self._report(StartFailed(WireError.of(error)))

    def progress(self, what: str, done: int, total: int) -> None:
        """How far this process has come."""
        self._report(Progress(what, done, total))

    def _report(self, report: Report) -> None:
        data = encode(report)
        os.write(self._reports, len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def _watch(self, on_death: Callable[[Boot], None] | None) -> None:
        while os.read(0, 4096):
            pass
        if on_death is not None:
            on_death(self.boot)
        os._exit(1)


def _read_exactly(descriptor: int, num_bytes: int) -> bytes | None:
    """None: the other end has closed."""
    data = b""
    while len(data) < num_bytes:
        more = os.read(descriptor, num_bytes - len(data))
        if not more:
            return None
        data += more
    return data
