"""The paged LoRA kernels as the runs that the LoRA op executes. Knows launches; imports Triton when one is executed.

Every launch may begin before the kernel before it has ended (programmatic dependent launch): it reads weights and
records at once, which no kernel of a step writes, and waits before it touches x, v or y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from interleaf.core import LoraGroup
from interleaf.kernels.records import RECORD_INTS, AdapterRecords, GroupLaunches, Launch, StepRows, rank_class
from interleaf.kernels.work import GroupRuns

Signature = tuple[int | None, ...]


class PagedLaunch:
    """One launch of one kernel, good for every layer that shares a layout."""

    __slots__ = ("_launch", "_options", "_pages", "_records", "_rows", "_shape", "_v")

    def __init__(
        self, launch: Launch, records: Tensor, rows: Tensor, pages: Tensor, v: Tensor, of: AdapterRecords
    ) -> None:
        form = launch.form
        self._launch = launch
        self._records, self._rows, self._pages, self._v = records, rows, pages, v
        self._shape = {
            "WIDTH": form.columns if launch.expand else form.step,
            "TILE": of.tile,
            "LANE_TILES": of.lane_tiles,
            "PAGE_TILES": of.page_tiles,
            "LOOKED_UP": form.looks_up(of.tile, of.lane_tiles),
            "PDL": v.is_cuda,
        }
        if launch.expand:
            self._shape |= {
                "SPLITS": 1 << (launch.splits - 1).bit_length(),
                "HIGHEST": rank_class(launch.highest, form.vector),
            }
        if not form.vector:
            self._shape |= {"TOKENS": form.tokens, "STAGES": form.stages, "PLAIN": launch.plain}
        if not form.vector and launch.expand:
            self._shape |= {"STEP": form.step}
        self._options = {"num_warps": form.warps, **({"launch_pdl": True} if v.is_cuda else {})}

    def add(self, x: Tensor, y: Tensor, pool: Tensor, first: int) -> None:
        """Do it for the layer whose lane in page 0 starts at element `first`."""
        from interleaf.kernels import mbgmm, mbgmv

        if y.stride(1) != 1:
            raise ValueError(f"y must have its columns side by side, got strides {y.stride()}")
        module = mbgmv if self._launch.form.vector else mbgmm
        where = (pool, self._pages, self._rows)
        layer_tiles = first // self._shape["TILE"]
        grid = (len(self._records),)
        if self._launch.expand:
            module.expand[grid](
                self._records, self._v, *where, y, y.stride(0), layer_tiles, **self._shape, **self._options
            )
        else:
            module.shrink[grid](
                self._records, x, x.stride(0), *where, self._v, layer_tiles, **self._shape, **self._options
            )


def paged_layers(
    adapters: Sequence[AdapterRecords],
    rows: Sequence[Sequence[int]],
    signatures: Sequence[Signature],
    device: torch.device,
) -> tuple[Mapping[LoraGroup, GroupRuns], ...]:
    """The runs of every layer; one copy to the device.

    Args:
        rows: the batch's rows of each adapter, ascending.
        signatures: for each layer the layout of each adapter.
    """
    step = StepRows(adapters, rows)
    made: dict[Signature, dict[LoraGroup, GroupLaunches]] = {}
    for signature in signatures:
        if signature not in made:
            made[signature] = step.groups(signature)
    every = [launch for groups in made.values() for g in groups.values() for launch in g.launches]
    on_device = iter(_to_device([step.rows, step.pages, *(l.records for l in every)], device))
    row_table, pages = next(on_device), next(on_device)
    v_elems = max((g.v_elems for groups in made.values() for g in groups.values()), default=0)
    v = torch.empty(v_elems, dtype=torch.float32, device=device)
    runs: dict[Signature, dict[LoraGroup, GroupRuns]] = {}
    for signature, groups in made.items():
        runs[signature] = {}
        for group, launches in groups.items():
            of_group = tuple(
                PagedLaunch(l, next(on_device), row_table, pages, v, adapters[0]) for l in launches.launches
            )
            runs[signature][group] = GroupRuns(of_group, launches.in_features, launches.out_features)
    return tuple(runs[signature] for signature in signatures)


def _to_device(arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]], device: torch.device) -> list[Tensor]:
    """All arrays in one copy; each begins at a multiple of a record."""
    flat = [a.reshape(-1) for a in arrays]
    sizes = [-(-len(a) // RECORD_INTS) * RECORD_INTS for a in flat]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, a in zip(torch.split(host, sizes), flat, strict=True):
        part[: len(a)] = torch.from_numpy(a)
    there = torch.split(host.to(device, non_blocking=True), sizes)
    return [part[: len(a)].view(array.shape) for part, a, array in zip(there, flat, arrays, strict=True)]
