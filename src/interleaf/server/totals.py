"""What all API processes of a server have counted together, through a file of each. Knows no metric by name.

    api-1 ──writes──▶ api-1.counts ──┐
    api-2 ──writes──▶ api-2.counts ──┴─ read, added up ──▶ whoever answers /metrics

A process counts on from where the one whose place it takes has left its file, and nothing is told that is not in a
file: so no counter ever falls, whichever process answers and however one died.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from interleaf.server.metrics import Counts, Metrics

_EVERY_S = 1.0
_DECODER = msgspec.msgpack.Decoder(Counts)


class Totals:
    """One process's part, and the sum of all.

    Args:
        metrics: what this process counts.
        model: as Metrics has it.
        file: this process's; the others' are its neighbours with the same suffix. None: there is this process only.
    """

    def __init__(self, metrics: Metrics, model: str, file: Path | None) -> None:
        self._metrics = metrics
        self._model = model
        self._file = file
        self._written = b""
        if file is not None and (before := _read(file)) is not None:
            metrics.add(before)

    def sum(self) -> Metrics:
        """Everything that was counted, by whomever."""
        if self._file is None:
            return self._metrics
        self.write()
        total = Metrics(self._model, self._metrics.table)
        for file in sorted(self._file.parent.glob(f"*{self._file.suffix}")):
            if (part := _read(file)) is not None:
                total.add(part)
        return total

    def write(self) -> None:
        """Bring this process's file up to date, at once or not at all, and the table of labels."""
        self._metrics.table.write()
        data = msgspec.msgpack.encode(self._metrics.counts())
        if self._file is None or data == self._written:
            return
        new = self._file.with_name(f".{self._file.name}.new")
        new.write_bytes(data)
        os.replace(new, self._file)
        self._written = data

    async def keep_written(self) -> None:
        """Write every second, until cancelled; then once more."""
        try:
            while True:
                self.write()
                await asyncio.sleep(_EVERY_S)
        finally:
            self.write()


def _read(file: Path) -> Counts | None:
    try:
        return _DECODER.decode(file.read_bytes())
    except OSError:
        return None
