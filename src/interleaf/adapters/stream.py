"""Writes a layer's matrices into its stream, in the order that a device wants. Knows where they lie, and no page.

Scale is folded into B in float32, before anything is rounded to the pool's dtype.
Source: docs/adr/0002-page-geometry.md, docs/adr/0010-image-order-per-device.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from interleaf.adapters.parsed import LoraPair
from interleaf.core import STACK_ROWS, LoraGroup, Module, StreamLayout, StreamOrder
from interleaf.parallel.shard import Shard, Span


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one module's halves go in a stream: views of it, so that filling them is nothing but copying.

    Attributes:
        a: for each run of rows of A, where it goes, [rows, in / tile, tile].
        b: where scaled B transposed goes, [rank, out / tile, tile].
    """

    module: Module
    inputs: Span
    outputs: Span
    a: tuple[tuple[slice, torch.Tensor], ...]
    b: torch.Tensor

    def fill(self, pair: LoraPair) -> None:
        """Write A and scaled B transposed."""
        a = share_of_a(pair, self.inputs)
        for rows, place in self.a:
            place.copy_((a if len(self.a) == 1 else a[rows]).view(place.shape))
        rank, tiles, tile = self.b.shape
        # numpy transposes matrices of so few columns several times faster than torch.
        scaled = share_of_b(pair, self.outputs).float().numpy() * np.float32(pair.scale)
        transposed = scaled.reshape(tiles, tile, rank).transpose(2, 0, 1)
        if self.b.dtype is torch.float32:
            np.copyto(self.b.numpy(), transposed)
        else:
            self.b.copy_(torch.from_numpy(np.ascontiguousarray(transposed)))


def places(stream: torch.Tensor, layout: StreamLayout, shard: Shard) -> list[Place]:
    """Where in a stream the matrices of a layer with that layout go. `StreamOrder.ROWS` is the case of one block of
    rows and one tile as wide as they are.
    """
    tiled = layout.order is StreamOrder.TILES
    found: list[Place] = []
    for group in LoraGroup:
        spans = layout.group(group)
        stack, top = sum(span.rank for span in spans), 0
        block = STACK_ROWS if tiled else max(1, stack)
        for span in spans:
            tile, first = layout.tile if tiled else span.in_features, spans[0].a_first
            runs: list[tuple[slice, torch.Tensor]] = []
            row = top
            while row < top + span.rank:
                begin = row // block * block
                height = min(block, stack - begin)
                end = min(begin + height, top + span.rank)
                whole = stream[first + begin * span.in_features :][: height * span.in_features]
                tiles = whole.view(span.in_features // tile, height, tile)
                runs.append((slice(row - top, end - top), tiles[:, row - begin : end - begin].transpose(0, 1)))
                row = end
            top += span.rank
            tile = layout.tile if tiled else span.out_features
            b = stream[span.b_first :][: span.b_elems].view(span.out_features // tile, span.rank, tile)
            inputs, outputs = shard.in_span(span.module), shard.out_span(span.module)
            found.append(Place(span.module, inputs, outputs, tuple(runs), b.transpose(0, 1)))
    return found


def share_of_a(pair: LoraPair, inputs: Span) -> torch.Tensor:
    """This rank's A, [rank, in]."""
    return pair.a if pair.a.shape[1] == inputs.count else pair.a[:, inputs.as_slice()]


def share_of_b(pair: LoraPair, outputs: Span) -> torch.Tensor:
    """This rank's B, [out, rank]."""
    return pair.b if pair.b.shape[0] == outputs.count else pair.b[outputs.as_slice()]
