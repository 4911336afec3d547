"""The paged LoRA kernels as the runs that the LoRA op executes. Knows launches; imports Triton when one is executed.

Every launch may begin before the kernel before it has ended (programmatic dependent launch): it reads weights and
records at once, which no kernel of a forward pass writes (resolve.py says why records are there), and waits before it
touches x, v or y. Programs without rows wait too: a launch of which all programs went at once could end before the
launch before it, and the launch after it would not wait for that one any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from interleaf.core import LoraGroup
from interleaf.kernels.launch_shapes import LaunchShape
from interleaf.kernels.launcher import ALIGNMENT, Launcher
from interleaf.kernels.records import PoolTiles
from interleaf.kernels.work import GroupRuns

_COMPILERS = 8
"""Threads: most of a compilation runs outside of Python."""


@contextmanager
def compiling() -> Iterator[None]:
    """Within, `PagedLaunch.compile` only begins to compile, side by side with others; all have ended afterwards."""
    import triton

    with ThreadPoolExecutor(_COMPILERS, "triton") as threads, triton.AsyncCompileMode(threads):
        yield


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """What all launches of a step read and write, on the device.

    Attributes:
        records: [N, 8] int32.
        rows: int32, the step's row table.
        pages: int32, page lists.
        v: float32.
    """

    records: Tensor
    rows: Tensor
    pages: Tensor
    v: Tensor


class PagedLaunch:
    """One launch of one kernel over `number` records from `first` on, good for every layer of a class."""

    __slots__ = ("_constants", "_grid", "_launcher", "_options", "_records", "_tables", "_tile", "shape")

    def __init__(self, shape: LaunchShape, pool: PoolTiles, tables: DeviceTables, first: int, number: int) -> None:
        form, on_gpu = shape.form, tables.v.is_cuda
        self.shape = shape
        self._launcher: Launcher | None = None
        self._records = tables.records[first : first + number]
        self._grid = (number, 1, 1)
        self._tables = tables
        self._tile = pool.tile
        self._constants: dict[str, int | bool] = {
            "WIDTH": form.columns if shape.expand else form.step,
            "TILE": pool.tile,
            "LANE_TILES": pool.lane_tiles,
            "PAGE_TILES": pool.page_tiles,
            "LOOKED_UP": form.looks_up(pool.tile, pool.lane_tiles),
            "PDL": on_gpu,
        }
        if shape.expand:
            self._constants |= {
                "SPLITS": shape.splits,
                "HIGHEST": shape.highest,
            }
        if not form.vector:
            self._constants |= {"TOKENS": form.tokens, "STAGES": form.stages, "PLAIN": shape.plain}
        if not form.vector and shape.expand:
            self._constants |= {"STEP": form.step}
        self._options = {"num_warps": form.warps, **({"launch_pdl": True} if on_gpu else {})}

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        """Do it for the layer whose lane in page 0 starts at element `first`."""
        if y.stride(1) != 1:
            raise ValueError(f"y must have its columns side by side, got strides {y.stride()}")
        row = y if self.shape.expand else x
        stride = row.stride(0)
        # All else that a compiled form depends on is the same in every call; the pool's dtype is the row's.
        kind = row.dtype, row.data_ptr() % ALIGNMENT, stride % ALIGNMENT, stride == 1, pool.data_ptr() % ALIGNMENT
        if self._launcher is None:
            self._launcher = Launcher(self._kernel())
        self._launcher.launch(kind, self._grid, self._arguments(row, pool, first), self._constants, self._options)

    def compile(self, x: Tensor, y: Tensor, pool: Tensor) -> None:
        """Have what `add` launches compiled, or read from Triton's cache; launch nothing."""
        arguments = self._arguments(y if self.shape.expand else x, pool, 0)
        self._kernel().warmup(*arguments, grid=self._grid, **self._constants, **self._options)

    def _kernel(self) -> Any:
        from interleaf.kernels import mbgmm, mbgmv

        module = mbgmv if self.shape.form.vector else mbgmm
        return module.expand if self.shape.expand else module.shrink

    def _arguments(self, row: Tensor, pool: Tensor, first: int) -> tuple[object, ...]:
        """What the kernel takes, but for constants.   Args: row: x of a shrink, y of an expand."""
        tables, layer_tiles = self._tables, first // self._tile
        if self.shape.expand:
            return self._records, tables.v, pool, tables.pages, tables.rows, row, row.stride(0), layer_tiles
        return self._records, row, row.stride(0), pool, tables.pages, tables.rows, tables.v, layer_tiles


@dataclass(frozen=True, slots=True)
class Place:
    """A group in a class of layers: its launches in their order, each with its first record and their number."""

    launches: Sequence[tuple[LaunchShape, int, int]]
    in_features: int
    out_features: int


def paged_layers(
    places: Sequence[Place], layer_class: Sequence[int], pool: PoolTiles, tables: DeviceTables
) -> tuple[Mapping[LoraGroup, GroupRuns], ...]:
    """The runs of every layer.

    Args:
        places: class after class, groups in the order of `LoraGroup`. Launches without records are dropped, groups
            without launches too.
    """
    classes: list[dict[LoraGroup, GroupRuns]] = []
    for first in range(0, len(places), len(LoraGroup)):
        of_class = {}
        for group, place in zip(LoraGroup, places[first : first + len(LoraGroup)], strict=True):
            runs = tuple(PagedLaunch(shape, pool, tables, at, n) for shape, at, n in place.launches if n)
            if runs:
                of_class[group] = GroupRuns(runs, place.in_features, place.out_features)
        classes.append(of_class)
    return tuple(classes[c] for c in layer_class)
