"""How fast adapters are copied and prompts computed: measured once, before the first request. Knows plans, no request.

The eviction order and the choice between swapping and computing again weigh one against the other (`PageCosts`). Rates
that changed while the engine runs would make its plans depend on the clock: so they are measured at start, with the
runner's own copies and steps, and hold until the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from interleaf.adapters.image import AdapterImage, layout_of
from interleaf.config import EngineConfig
from interleaf.core import AdapterLoad, AdapterUid, Chunk, Module, SamplingParams, SeatStart, StepPlan, StreamOrder
from interleaf.engine.engine import Runner
from interleaf.errors import InterleafError
from interleaf.memory.eviction import PageCosts
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard

_PROBE = AdapterUid("rate probe")
_RANKS = (16, 8, 4, 2, 1)
_COPIES = 4
"""The fastest counts: whatever else the machine does only slows, and the first pays for what is made once."""

_PROMPT_TOKENS = 256
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


_CPU_TOKENS = 48
"""Of the step that is timed: 0.25 s of a small model on one core, and a rate a quarter below that of long prompts. On a
GPU two steps are timed, each as large as steps may be.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a page costs is made of these.

    Attributes:
        copy: bytes a second from host memory to the pool.
        prefill: tokens of prompts a second, of the base model.
        note: the same for people, with where they come from.
    """

    copy: float
    prefill: float
    note: str = ""

    def costs(self, geometry: PageGeometry) -> PageCosts:
        """What a page costs at these rates."""
        return PageCosts(geometry.page_bytes / self.copy, geometry.page_tokens / self.prefill)


_CPU_RATES, _GPU_RATES = Rates(4e9, 1e3), Rates(50e9, 3e4)


def nominal_rates(config: EngineConfig) -> Rates:
    """What holds until something else is known: of a small model on two cores, of an 8B model on a GPU with PCIe 5."""
    return _CPU_RATES if config.device == "cpu" else _GPU_RATES


def find_rates(
    config: EngineConfig,
    probe: RateProbe,
    geometry: PageGeometry,
    max_model_len: int,
    make_image: Callable[[], AdapterImage | None],
) -> Rates:
    """The rates that hold from now on: as set, else as measured.

    Args:
        make_image: to be copied, as the host tier would hold it; None if the pool is too small for any.

    Raises: InterleafError: adapters cannot be copied.
    """
    copy: float | None = config.copy_rate_bytes
    prefill: float | None = config.prefill_rate
    copy_is, prefill_is = ("measured" if rate is None else "set" for rate in (copy, prefill))
    if copy is None:
        image = make_image()
        if image is None:
            copy, copy_is = nominal_rates(config).copy, "a guess: the pool is too small to measure it"
        else:
            copy = probe.copy_rate(image)
    if prefill is None:
        most, times = (_CPU_TOKENS, 1) if config.device == "cpu" else (config.max_batch_tokens, 2)
        most = min(most, config.max_batch_tokens)
        prefill = probe.prefill_rate(geometry, most, max_model_len, config.max_num_seqs, times)
    note = f"copies to the pool {copy / 1e9:.3g} GB/s ({copy_is}), prompts {prefill:.4g} tokens/s ({prefill_is})"
    logger.info("rates: %s", note)
    return Rates(copy, prefill, note)


class ProbedImages:
    """The host tier's images, and one that is in no tier, while copies of it are timed."""

    def __init__(self, image: Callable[[AdapterUid], AdapterImage]) -> None:
        self._image = image
        self.probe: AdapterImage | None = None

    def __call__(self, uid: AdapterUid) -> AdapterImage:
        """Raises: AdapterLoadFailed: it is not in memory."""
        return self.probe if uid == _PROBE and self.probe is not None else self._image(uid)


def probe_image(
    shard: Shard, geometry: PageGeometry, dtype: torch.dtype, order: StreamOrder, num_pages: int
) -> AdapterImage | None:
    """An adapter of usual size, of all modules, full of ones. None: not even one of rank 1 has so few pages."""
    for rank in _RANKS:
        ranks = {(layer, module): rank for layer in range(geometry.num_layers) for module in Module}
        layout = layout_of(ranks, shard, geometry, order)
        if layout.pages <= num_pages:
            # Written to: memory that never was is one page of zeros, which every cache holds.
            return AdapterImage(layout, torch.ones(layout.pages, geometry.num_layers, geometry.lane_elems, dtype=dtype))
    return None


class RateProbe:
    """Times a runner that has no seats taken and no adapters. It is as new after that; pages may hold other bytes.

    Args:
        images: that the runner copies.
        now: seconds.
    """

    def __init__(self, runner: Runner, images: ProbedImages, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._images = images
        self._now = now
        self._num_steps = 0

    def copy_rate(self, image: AdapterImage) -> float:
        """Bytes a second of an adapter's way into the pool, as every later one will go it.

        Args:
            image: as the host tier would hold it: registered with the driver, if there is one.

        Raises: InterleafError: a copy has failed.
        """
        self._images.probe = image
        load = AdapterLoad(_PROBE, tuple(range(image.layout.pages)))
        best = float("inf")
        for _ in range(_COPIES):
            began = self._now()
            self._launch(StepPlan(self._step(), load=(load,)))
            reports = [*self._runner.poll_loads()]
            while not reports:
                self._runner.wait_for_load()
                reports += self._runner.poll_loads()
            best = min(best, self._now() - began)
            if reports[0].error is not None:
                raise InterleafError(f"adapters cannot be copied to the pool: {reports[0].error}")
            self._launch(StepPlan(self._step(), evict=(_PROBE,)))
        self._images.probe = None
        return image.num_bytes / max(best, 1e-9)

    def prefill_rate(
        self, geometry: PageGeometry, num_tokens: int, max_model_len: int, num_seats: int, times: int
    ) -> float:
        """Tokens a second of one step of prompts.

        Args:
            num_tokens: of the step, at most.
            times: that it is computed; the fastest counts.
        """
        length = min(_PROMPT_TOKENS, max_model_len, num_tokens)
        seats = range(max(1, min(num_seats, num_tokens // length)))
        pages = tuple(range(geometry.pages_for_tokens(length)))  # everybody's: nothing is read that matters
        best = float("inf")
        for _ in range(times):
            starts = tuple(SeatStart(seat, None, (0,) * length, length, _GREEDY, 0, pages, ()) for seat in seats)
            chunks = tuple(Chunk(seat, 0, length, samples=True) for seat in seats)
            began = self._now()
            self._launch(StepPlan(self._step(), start=starts, chunks=chunks))
            best = min(best, self._now() - began)
            self._launch(StepPlan(self._step(), vacate=tuple(seats)))
        return length * len(seats) / max(best, 1e-9)

    def _step(self) -> int:
        self._num_steps += 1
        return self._num_steps - 1

    def _launch(self, plan: StepPlan) -> None:
        self._runner.launch(plan).result()
