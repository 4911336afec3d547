"""What LoRA launches are compiled for: all of it is known before the first adapter comes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from bench.engine_rows import model_path
from bench.engine_setup import read_spec
from interleaf.adapters.image import layout_of
from interleaf.core import STACK_ROWS, Module, PooledLayout, StreamOrder
from interleaf.kernels.forms import all_pairs
from interleaf.kernels.launch_shapes import CUT_RANKS, LaunchShape, all_shapes, launch_shapes, widest
from interleaf.kernels.layouts import Field, LayoutSet
from interleaf.kernels.residents import Residents
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard

RANKS = (1, 3, 8, 12, 16, 17, 32, 40, 64, 65, 128, 200)


class Model:
    """A pool of a model's widths, one layer deep. Args: num_heads: others than the model's, if any."""

    def __init__(self, name: str, world: int, num_heads: int | None = None) -> None:
        spec = read_spec(model_path(name))
        spec = dataclasses.replace(spec, num_heads=num_heads or spec.num_heads)
        self.shard = Shard(spec, 0, world)
        self.geometry = PageGeometry(16, 1, self.shard.kv_heads.count, spec.head_dim, 2)

    def layout(self, ranks: dict[Module, int]) -> PooledLayout:
        return layout_of({(0, m): r for m, r in ranks.items()}, self.shard, self.geometry, StreamOrder.TILES)

    def layouts(self, *layouts: PooledLayout) -> LayoutSet:
        residents = Residents(1, self.geometry.lane_elems, torch.device("cpu"))
        for number, layout in enumerate(layouts):
            residents.add(number, layout, range(layout.pages))
        return residents.layouts()

    def known_at_start(self) -> set[LaunchShape]:
        return all_shapes(self.layouts(*(self.layout(dict.fromkeys(Module, rank)) for rank in CUT_RANKS)).fields)


def launched(layouts: LayoutSet) -> set[LaunchShape]:
    """Whatever steps with adapters of these layouts may launch: each pair of forms, and forms joined in a launch."""
    found: set[LaunchShape] = set()
    by_form: dict[tuple[object, bool, int], list[LaunchShape]] = {}
    for pair in all_pairs(layouts.highest > STACK_ROWS):
        fields = layouts.fields(pair)
        for of_batch, number in zip(launch_shapes(fields, pair), (Field.A_NUMBER, Field.B_NUMBER), strict=True):
            for place, shape in enumerate(of_batch):
                if fields[:, place, number].any():  # else there is no launch
                    found.add(shape)
                    by_form.setdefault((shape.form, shape.expand, place), []).append(shape)
    return found | {widest(shapes) for shapes in by_form.values()}


@pytest.mark.parametrize(
    ("name", "world", "num_heads"),
    [("llama3-8b", 1, None), ("llama2-7b", 1, None), ("llama-70b", 8, None), ("llama3-8b", 1, 8)],
)
def test_whatever_adapters_come_nothing_is_launched_that_was_not_compiled_at_start(
    name: str, world: int, num_heads: int | None
) -> None:
    """Eight heads: attention that is narrower than the stream beside it, so that no two groups read the same width."""
    model, draw = Model(name, world, num_heads), random.Random(5)
    known = model.known_at_start()
    met: set[LaunchShape] = set()
    for _ in range(30):
        layouts = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            modules = [m for m in Module if draw.random() < 0.7] or [Module.V]
            rank = draw.choice([None, *RANKS])
            layouts.append(model.layout({m: rank or draw.choice(RANKS) for m in modules}))
        met |= launched(model.layouts(*dict.fromkeys(layouts)))
    assert met <= known
    assert len(met) > len(known) / 2, "what is compiled is what may be met, not much more"
