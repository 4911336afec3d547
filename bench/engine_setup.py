"""An engine for the benchmark: built once, used for many rows. Only this file knows how engines are put together."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.engine_adapters import BenchImages, HostArena
from bench.engine_log import RecordingRunner
from bench.engine_rows import AdapterSet
from interleaf.config import EngineConfig
from interleaf.core import ModelSpec
from interleaf.errors import ConfigError
from interleaf.memory.allocator import OwnerKind, PageOwner
from interleaf.model.spec import parse_spec
from interleaf.parallel.shard import Shard

if TYPE_CHECKING:
    from interleaf.engine.build import EngineParts
    from interleaf.engine.client import InProcessClient

_HELD = PageOwner(OwnerKind.KV, "held back by the benchmark")
_RESET_LIMIT_S = 60.0
PLAIN_POOL_BYTES = 13 * 10**9
"""What a capped pool has beside its share of the adapters (issue C's table)."""


def read_spec(model: Path) -> ModelSpec:
    """The shape that a config.json describes. Raises: ModelRejected; ConfigError: it cannot be read."""
    path = model / "config.json" if model.is_dir() else model
    try:
        return parse_spec(json.loads(path.read_text()), str(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not the configuration of a model: {error}") from error


def assemble(
    model: Path, settings: dict[str, Any], arena: HostArena, progress: Callable[[str, int, int], None] | None = None
) -> tuple[EngineParts, BenchImages, RecordingRunner]:
    """An engine whose adapters are the benchmark's and whose plans are recorded. The rest is as everywhere.

    Raises: whatever `build_engine` raises.
    """
    from interleaf.engine.build import build_engine, stream_order
    from interleaf.engine.engine import Engine

    config = EngineConfig.from_mapping(settings)
    shard = Shard(read_spec(model))
    made: list[BenchImages] = []

    def make_store(geometry: Any, dtype: torch.dtype) -> BenchImages:
        made.append(BenchImages(shard, geometry, dtype, stream_order(config), arena))
        return made[0]

    parts = build_engine(str(model), config, progress, make_store)
    recording = RecordingRunner(parts.runner, parts.allocator)
    engine = Engine(parts.scheduler, recording, lookahead=1 if config.overlap else 0)
    return dataclasses.replace(parts, engine=engine), made[0], recording


class BenchEngine:
    """One engine and its host tier; rows come and go, weights, graphs and the pool's storage stay.

    Attributes:
        parts: the engine's rooms.   images: its host tier.   recording: what it has planned since `recording.reset`.
        client: how requests get in and events out.
        build_s: seconds that all of it took.
    """

    def __init__(
        self,
        model: Path,
        settings: dict[str, Any],
        arena: HostArena,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        from interleaf.engine.client import InProcessClient

        begin = time.perf_counter()
        self.parts, self.images, self.recording = assemble(model, settings, arena, progress)
        self.client: InProcessClient = InProcessClient(self.parts)
        self.build_s = time.perf_counter() - begin
        self._held: tuple[int, ...] = ()

    @property
    def itemsize_bytes(self) -> int:
        return self.parts.geometry.itemsize_bytes

    @property
    def num_pool_pages(self) -> int:
        """Pages that the row may use."""
        return self.parts.allocator.num_pages - len(self._held)

    def lay_out(self, adapters: AdapterSet, indices: Iterable[int]) -> dict[int, str]:
        """Make the images of a row's adapters. Returns: the source of each, by index."""
        self.clear_adapters()
        return self.images.lay_out(adapters, indices)

    def register(self, sources: dict[int, str]) -> dict[int, str]:
        """Register all adapters afresh, so that none is in the pool. Returns: their names, by index."""
        self.clear_adapters()
        names = {index: f"adapter-{index}" for index in sources}
        for index, source in sources.items():
            self.client.add_adapter(names[index], source)
        return names

    def clear_adapters(self) -> None:
        """Withdraw all adapters and wait until their pages are free. No request may be open."""
        assert not self.client.has_work
        for name in self.client.adapters():
            self.client.remove_adapter(name)
        begin = time.perf_counter()
        while self.parts.allocator.num_used_pages(OwnerKind.ADAPTER):  # copies are still under way
            self.client.poll()
            if time.perf_counter() - begin > _RESET_LIMIT_S:
                raise RuntimeError(f"adapters still hold pages {_RESET_LIMIT_S:.0f} s after the last was removed")
        self.parts.allocator.check()

    def cap_pool(self, num_bytes: int | None) -> None:
        """Leave the pool only so many bytes (None: all): the others are held back. No request may be open.

        Of a pool that is split (`memory_split`) the sequences' part shrinks.
        """
        surplus = 0
        if num_bytes is not None:
            surplus = self.parts.allocator.num_pages - self.parts.geometry.pages_for_bytes(num_bytes)
        self.hold(max(0, surplus))

    def hold(self, num_pages: int) -> tuple[int, ...]:
        """Hold so many pages back, instead of those held back before. Returns: which."""
        allocator = self.parts.allocator.sequences
        allocator.free(self._held, _HELD)
        self._held = ()
        if num_pages:
            self._held = tuple(allocator.alloc(num_pages, _HELD))
        return self._held

    def counters(self) -> dict[str, float]:
        """Running totals of runner, residency and scheduler. What one of them does not count is 0."""
        stats = getattr(self.parts.runner, "stats", None)  # a runner on a CPU keeps none
        runner = None if stats is None else stats()
        of_runner = ("num_graph_steps", "num_stand_ins", "num_captures", "capture_seconds", "launch_seconds")
        names = {
            **dict.fromkeys(of_runner, runner),
            **dict.fromkeys(("hits", "misses", "late_prefetches"), self.parts.residency.counts),
            "num_preemptions": self.parts.scheduler,
        }
        return {name: float(getattr(source, name, 0)) for name, source in names.items()}

    def close(self) -> None:
        """Release the engine; the arena stays its owner's."""
        self.client.close()
        del self.parts, self.images, self.recording, self.client  # whoever still holds this object holds no memory
