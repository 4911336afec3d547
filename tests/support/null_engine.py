"""An engine without a model: it answers at once, with tokens that a test chooses. Shows what HTTP costs by itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

from interleaf.core import (
    AdapterFound,
    AdapterUid,
    Event,
    FinishReason,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceStart,
    TokenEvent,
    TokenLogprobs,
)
from interleaf.engine.serving import EngineInfo, OnLeft
from interleaf.errors import AdapterNotFound, EngineDead
from interleaf.stats import EngineStats

LOADED = "adapter is copied to the pool"
Answer = Callable[[Sequence[int], int], Sequence[int]]
"""Output tokens from a prompt and the sequence's index; as many as max_tokens are used, from the beginning again."""


class NullEngine:
    """Follows AsyncEngine's contract. Every turn of the event loop is a step: one more token for every sequence.

    Attributes:
        salts: of all requests.
        num_running: requests between their first step and their end, however it came.
        aborted: (request id, index) of every call of `abort`.
        held: while it is not set no request takes a step.
        prefix_cache: whether it claims to have one; then all of a prompt but its last token was found in it.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        vocab_size: int = 256,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        adapters: tuple[str, ...] = (),
        prefix_cache: bool = False,
    ) -> None:
        self._answer = answer
        self._info = EngineInfo(vocab_size, max_model_len, (2,), max_num_seqs, prefix_cache)
        self._adapters = adapters
        self._used: set[str] = set()
        self.salts: list[str | None] = []
        self._ids = itertools.count()
        self._failure: str | None = None
        self.num_running = 0
        self.aborted: list[tuple[str, int | None]] = []
        self.held = asyncio.Event()
        self.held.set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    def adapters(self) -> tuple[str, ...]:
        return self._adapters

    def has_adapter(self, name: str) -> bool:
        return name in self.adapters()

    def die(self, reason: str) -> None:
        """Fail every request now and refuse those that come."""
        self._failure = reason

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        cache_salt: str | None = None,
        on_left: OnLeft | None = None,
    ) -> AsyncIterator[list[Event]]:
        if self._failure is not None:
            raise EngineDead(self._failure)
        if adapter is not None and adapter not in self._adapters:
            raise AdapterNotFound(adapter)
        id_ = f"request-{next(self._ids)}"
        answers = [self._answer(prompt_token_ids, index) for index in range(params.n)]
        self.num_running += 1
        self.salts.append(cache_salt)
        start = self._start(len(prompt_token_ids), adapter)
        try:
            for position in range(params.max_tokens):
                await self.held.wait()
                await asyncio.sleep(0)
                if self._failure is not None:
                    yield [RequestFailed(id_, self._failure)]
                    return
                is_last = position == params.max_tokens - 1
                events: list[Event] = [
                    TokenEvent(
                        id_,
                        index,
                        answer[position % len(answer)],
                        None if params.logprobs is None else _logprobs(answer[position % len(answer)], params.logprobs),
                        FinishReason.LENGTH if is_last else None,
                        start=None if position else start,
                    )
                    for index, answer in enumerate(answers)
                ]
                yield [*events, RequestFinished(id_)] if is_last else events
        finally:
            self.num_running -= 1

    def _start(self, prompt_tokens: int, adapter: str | None) -> SequenceStart:
        """Made up: half a second in the queue, and a quarter more to load an adapter that comes for the first time."""
        seats = {"seats": 0.5}
        num_cached = prompt_tokens - 1 if self._info.prefix_cache else 0
        if adapter is None:
            return SequenceStart(0.5, num_cached, waits=seats)
        if adapter in self._used:
            return SequenceStart(0.5, num_cached, AdapterFound.HIT, waits=seats)
        self._used.add(adapter)
        return SequenceStart(0.75, num_cached, AdapterFound.MISS, 0.25, seats | {LOADED: 0.25})

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    async def load_adapter(self, name: str, source: str) -> AdapterUid:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def close(self) -> None:
        self.die("the engine has stopped")


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """Made up, but telling: alternative k of a token is the token k above it, e^-k as probable as nothing else."""
    return TokenLogprobs(-0.5, 1, tuple((token + k) % 256 for k in range(count)), tuple(-0.5 - k for k in range(count)))
