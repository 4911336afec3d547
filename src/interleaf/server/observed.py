"""An engine that counts what passes through it: tokens, times, ends; it logs who waits. Changes nothing; no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast

from interleaf.core import (
    AdapterUid,
    Event,
    FinishReason,
    RequestFailed,
    RequestWaiting,
    RequestWaits,
    SamplingParams,
    SequenceStart,
    TokenEvent,
)
from interleaf.engine.serving import AsyncEngine, EngineInfo, OnLeft
from interleaf.errors import InterleafError
from interleaf.server.labels import AdapterCounts, add_up
from interleaf.server.metrics import Metrics
from interleaf.stats import EngineStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrival:
    """One HTTP request, as far as the engine has heard of it: what its line in the log says.

    Attributes:
        at_s: when it arrived (`time.perf_counter`).
        request_id: the client's name for it, or ours.
        first_token_s: from then to the first token; None before it.
        waits: seconds that its sequences waited for their seats, summed by what for.
    """

    at_s: float = field(default_factory=time.perf_counter)
    request_id: str | None = None
    adapters: list[str] = field(default_factory=list)
    num_generations: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    waits: dict[str, float] = field(default_factory=dict)


ARRIVAL: ContextVar[Arrival | None] = ContextVar("interleaf_arrival", default=None)
"""The HTTP request that the running task answers."""


class ObservedEngine:
    """An AsyncEngine around another one, whose requests go into `metrics` and into the current Arrival."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._open: dict[str, _Observation] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    def adapters(self) -> tuple[str, ...]:
        """See AsyncEngine."""
        return self._engine.adapters()

    def has_adapter(self, name: str) -> bool:
        """See AsyncEngine."""
        return self._engine.has_adapter(name)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        on_left: OnLeft | None = None,
    ) -> AsyncIterator[list[Event]]:
        """See AsyncEngine."""
        observation = _Observation(self._metrics, ARRIVAL.get() or Arrival(), adapter, len(prompt_token_ids), params.n)

        def left(event: Event) -> None:
            observation.late(event)
            if on_left is not None:
                on_left(event)

        generator = self._engine.generate(prompt_token_ids, params, adapter, cache_salt, left)
        events = cast("AsyncGenerator[list[Event]]", generator)
        task = asyncio.current_task()  # now: a generator that was left behind is closed by some other one
        request_id: str | None = None
        try:
            async with aclosing(events):
                async for batch in events:
                    if request_id is None:
                        request_id = batch[0].request_id
                        self._open[request_id] = observation
                        observation.accepted()
                    observation.take(batch)
                    yield batch
        except InterleafError:
            if request_id is None:
                self._metrics.refused += 1
            raise
        finally:
            if request_id is not None:
                del self._open[request_id]
                cancelled = task is not None and task.cancelling() > 0
                observation.end(cancelled=cancelled)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See AsyncEngine. One sequence is ended by the server when its text holds a stop string."""
        observation = self._open.get(request_id)
        if observation is not None and index is not None:
            observation.stopped_by_text(index)
        self._engine.abort(request_id, index)

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        """See AsyncEngine."""
        return await self._engine.load_adapter(name, source)

    async def unload_adapter(self, name: str) -> None:
        """See AsyncEngine."""
        await self._engine.unload_adapter(name)

    async def stats(self) -> EngineStats:
        """See AsyncEngine."""
        return await self._engine.stats()

    async def close(self) -> None:
        """See AsyncEngine."""
        await self._engine.close()


class _Observation:
    """One request of the engine."""

    def __init__(
        self, metrics: Metrics, arrival: Arrival, adapter: str | None, prompt_tokens: int, num_sequences: int
    ) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._adapter = adapter
        self._counts = AdapterCounts(requests=1, prompt_tokens=prompt_tokens)  # of this request, for its adapter
        self._last_s: list[float | None] = [None] * num_sequences
        self._reasons: list[str | None] = [None] * num_sequences
        self._terminal: Event | None = None
        self._num_tokens = 0
        self._is_accepted = False

    def accepted(self) -> None:
        self._is_accepted = True
        self._metrics.prompt_tokens += self._counts.prompt_tokens
        self._arrival.num_generations += 1
        self._arrival.prompt_tokens += self._counts.prompt_tokens
        if self._adapter is not None and self._adapter not in self._arrival.adapters:
            self._arrival.adapters.append(self._adapter)

    def take(self, batch: Sequence[Event]) -> None:
        """Count the events of one moment."""
        now = time.perf_counter()
        if len(batch) == 1:
            (event,) = batch
            if type(event) is TokenEvent and event.start is None and event.finish_reason is None:
                self._tokens(event.index, 1, now)  # nearly always it is that
                return
        counts = [0] * len(self._last_s)
        for event in batch:
            if isinstance(event, TokenEvent):
                counts[event.index] += 1
                if event.start is not None:
                    self._started(event.start)
                if event.finish_reason is not None and self._reasons[event.index] is None:
                    aborted = event.finish_reason is FinishReason.ABORT
                    self._reasons[event.index] = None if aborted else event.finish_reason.value
            elif isinstance(event, RequestWaiting):
                self._log_wait(event)
            else:
                self._terminal = event
                self._waited(event.waits, self._counts)
        for index, count in enumerate(counts):
            if count:
                self._tokens(index, count, now)

    def stopped_by_text(self, index: int) -> None:
        self._reasons[index] = self._reasons[index] or FinishReason.STOP.value

    def _started(self, start: SequenceStart) -> None:
        """A sequence has its first token."""
        counts = self._counts
        if not counts.starts:
            self._metrics.queue_s.observe(start.queue_s)
        counts.starts += 1
        counts.queue_s += start.queue_s
        self._waited(RequestWaits(first=start.waits), counts)
        if start.found is not None:
            setattr(counts, start.found.value, getattr(counts, start.found.value) + 1)
        if start.load_s is not None:
            counts.loads += 1
            counts.load_s += start.load_s

    def _waited(self, waits: RequestWaits | None, counts: AdapterCounts) -> None:
        """Its sequences have waited, beside what was told before."""
        if waits is None:
            return
        for told, totals in (
            (waits.first, (self._metrics.waits, counts.waits, self._arrival.waits)),
            (waits.again, (self._metrics.waits_again, counts.waits_again, self._arrival.waits)),
        ):
            for total in totals:
                add_up(total, told)

    def late(self, event: Event) -> None:
        """Something of a request that nobody reads any more. What it has waited for until then is not lost."""
        if isinstance(event, TokenEvent | RequestWaiting):
            if isinstance(event, TokenEvent) and event.start is not None:
                self._count_late(RequestWaits(first=event.start.waits))
            return
        if not self._is_accepted:  # its reader has left before anything was said
            self.accepted()
            self.end(cancelled=True)
        self._count_late(event.waits)

    def _count_late(self, waits: RequestWaits | None) -> None:
        """`end` has counted the request already."""
        counts = AdapterCounts()
        self._waited(waits, counts)
        if self._adapter is not None:
            self._metrics.adapters.add(self._adapter, counts)

    def _log_wait(self, wait: RequestWaiting) -> None:
        fields = {
            "request_id": self._arrival.request_id,
            "adapter": self._adapter,
            "waited_s": round(wait.waited_s, 1),
            "reason": wait.reason,
            "waited_for": rounded(wait.waits),
        }
        logger.info("request waits", extra={"fields": fields})  # as `logs.log_fields`, which knows this module

    def end(self, *, cancelled: bool) -> None:
        """Count the request.

        Args:
            cancelled: its task was, because the client has gone. A reader that leaves early by itself has all it wants:
                the last sequence has come to a stop string.
        """
        if isinstance(self._terminal, RequestFailed):
            default = "error"
        elif self._terminal is None and not cancelled:
            default = FinishReason.STOP.value
        else:
            default = FinishReason.ABORT.value
        for reason in (reason or default for reason in self._reasons):
            self._metrics.finished[reason] += 1
            self._arrival.finish_reasons.append(reason)
        self._metrics.whole_request_s.observe(time.perf_counter() - self._arrival.at_s)
        if self._adapter is not None:
            self._counts.generation_tokens = self._num_tokens
            self._metrics.adapters.add(self._adapter, self._counts)

    def _tokens(self, index: int, count: int, now: float) -> None:
        """`count` tokens of a sequence; several that come together share the time since the last."""
        self._num_tokens += count
        self._metrics.generation_tokens += count
        self._arrival.generation_tokens += count
        last = self._last_s[index]
        if last is not None:
            self._metrics.between_tokens_s.observe((now - last) / count, count)
        self._last_s[index] = now
        if self._num_tokens == count:  # the request's first
            elapsed = now - self._arrival.at_s
            self._metrics.first_token_s.observe(elapsed)
            self._counts.first_tokens = 1
            self._counts.first_token_s = elapsed
            if self._arrival.first_token_s is None:
                self._arrival.first_token_s = elapsed


def rounded(waits: Mapping[str, float]) -> dict[str, float]:
    """Seconds by reason for a line of the log, the most first; what is less than half a millisecond is left out."""
    shown = {reason: round(seconds, 3) for reason, seconds in waits.items()}
    return dict(sorted(((r, s) for r, s in shown.items() if s), key=lambda item: -item[1]))
