"""`interleaf serve` as an operator starts it: a program of its own, asked over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from tests.conftest import REPOSITORY
from tests.support.waiting import WAIT_S

_READY = re.compile(r"ready: .* answers at (http://[^/]+)/v1")


class Program:
    """Runs until the `with` block ends.

    Args:
        words: of the command line, after `interleaf serve`.
        folder: for its slabs. Its temporary files get a folder with a short path: sockets lie there, and the path of
            one may have about 100 bytes.

    Attributes:
        url: where it answers.
        log: its lines so far.
    """

    def __init__(self, *words: object, folder: Path, **environment: str) -> None:
        self._words = [str(word) for word in words]
        self._folder = folder
        self._temporary = tempfile.TemporaryDirectory(prefix="il-")
        self._environment = environment
        self._ready = threading.Event()
        self.log: list[str] = []
        self.url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def __enter__(self) -> Program:
        paths = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
        slabs = self._folder / "slabs"
        slabs.mkdir()
        code = "from interleaf.cli import app; app()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *self._words, "--port", "0", "--slab-dir", str(slabs)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "TMPDIR": self._temporary.name,
                "OMP_NUM_THREADS": "1",
            }
            | self._environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(WAIT_S) or not self.url:
            self._end()
            self._temporary.cleanup()
            raise AssertionError(f"it did not start: {self.log}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        if kind is None:
            assert self.process.returncode == 0, self.log[-20:]
        left = [*(self._folder / "slabs").iterdir(), *Path(self._temporary.name).glob("interleaf-*")]
        self._temporary.cleanup()
        assert kind is not None or left == [], "it left something behind"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := _READY.search(line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()  # it has ended

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(WAIT_S)
            finally:
                self.process.kill()
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
