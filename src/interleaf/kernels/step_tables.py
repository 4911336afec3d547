"""The device's tables of a step and the one upload that fills them. Knows streams and events; not what a record means.

Tables are shared by all steps: a stream computes one after another. They move when a step needs more room; whoever has
captured the old ones keeps them, and steps planned for them fill them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interleaf.kernels.cuda import DeviceTables
from interleaf.kernels.records import RECORD_INTS, Ints, PoolTiles
from interleaf.kernels.tasks import TASK_INTS
from interleaf.kernels.uploads import send

_BLOCK = 32
"""Records that a program of the resolve kernel makes at a time: one warp."""
_GROWTH = 1.5


class Staging:
    """Pinned memory that a copy may still read while the next step's is filled: two blocks take turns."""

    def __init__(self, device: torch.device, ints: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._blocks = [torch.empty(ints, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, rows: Ints, tasks: Ints, target: Tensor) -> None:
        """Enqueue one copy of rows and then, from a multiple of a task on, tasks."""
        self._turn ^= 1
        at = tasks_from(len(rows))
        ints = at + tasks.size
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # of two steps ago: done, unless a caller runs further ahead
        if len(self._blocks[self._turn]) < ints:  # the old one may go: nothing reads it any more
            self._blocks[self._turn] = torch.empty(int(ints * _GROWTH), dtype=torch.int32, pin_memory=self._on_gpu)
        block = self._blocks[self._turn].numpy()
        block[: len(rows)] = rows
        block[at:ints] = tasks.ravel()
        send(self._blocks[self._turn][:ints], target[:ints])
        if self._on_gpu:
            copied = self._copied[self._turn] = copied or torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            copied.record()


def tasks_from(rows: int) -> int:
    """Where tasks begin in a table with so many rows."""
    return -(-rows // TASK_INTS) * TASK_INTS


@dataclass(frozen=True, slots=True)
class StepTable:
    """What is copied for one step."""

    rows: Ints
    tasks: Ints


class StepTables:
    """Tables of a size.

    Attributes:
        tables: as launches see them.
    """

    def __init__(self, ints: int, records: int, v_elems: int, pages: Tensor, pool: PoolTiles) -> None:
        device = pages.device
        self._ints = torch.empty(ints, dtype=torch.int32, device=device)
        self._pool = pool
        self._holds: StepTable | None = None
        self.tables = DeviceTables(
            records=torch.empty(records, RECORD_INTS, dtype=torch.int32, device=device),
            rows=self._ints,
            pages=pages,
            v=torch.empty(v_elems, dtype=torch.float32, device=device),
        )

    def fits(self, ints: int, records: int, v_elems: int) -> bool:
        return len(self._ints) >= ints and len(self.tables.records) >= records and len(self.tables.v) >= v_elems

    def grown(self, ints: int, records: int, v_elems: int) -> StepTables:
        """Larger ones, with room."""
        had = (len(self._ints), len(self.tables.records), len(self.tables.v))
        ints, records, v_elems = (
            h if h >= n else int(n * _GROWTH) for h, n in zip(had, (ints, records, v_elems), strict=True)
        )
        return StepTables(ints, records, v_elems, self.tables.pages, self._pool)

    def fill(self, table: StepTable, staging: Staging, pieces: Tensor) -> None:
        """Enqueue what makes these tables the step's; nothing, if they are."""
        if self._holds is table:
            return
        from interleaf.kernels.resolve import resolve

        staging.copy(table.rows, table.tasks, self._ints)
        tasks = self._ints[tasks_from(len(table.rows)) :]
        resolve[(len(table.tasks),)](
            tasks,
            pieces,
            self.tables.pages,
            self.tables.records,
            LANE_TILES=self._pool.lane_tiles,
            PAGE_TILES=self._pool.page_tiles,
            BLOCK=_BLOCK,
            num_warps=1,
        )
        self._holds = table
