"""A request at the engine: its prompts run side by side, their continuations grow. No JSON, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from interleaf.core import Event, RequestAborted, RequestFailed, RequestWaiting, SamplingParams, TokenEvent
from interleaf.engine.output import Completion
from interleaf.engine.serving import AsyncEngine
from interleaf.server.errors import bad_request, engine_failed
from interleaf.server.state import Serving


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has been checked.

    Attributes:
        prompts: token ids of each prompt.
        adapter: None for the base model.
        cache_salt: only requests of the same salt share cached prefixes.
    """

    prompts: tuple[list[int], ...]
    params: SamplingParams
    adapter: str | None
    cache_salt: str | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.n


def check_prompt(engine: AsyncEngine, token_ids: Sequence[int], max_tokens: int, field: str) -> None:
    """What the engine would refuse, refused before anything is sent. Raises: ApiError: 400 that names the field."""
    info = engine.info
    if not token_ids:
        raise bad_request(f"{field} has no tokens, at least 1 is needed", field)
    if len(token_ids) + max_tokens > info.max_model_len:
        raise bad_request(
            f"{field} of {len(token_ids)} tokens + max_tokens={max_tokens} is over the limit of {info.max_model_len} "
            "tokens",
            field,
            "context_length_exceeded",
        )
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < info.vocab_size:
            raise bad_request(f"{field}: token id {token} is not from 0 to {info.vocab_size - 1}", field)


class Generation:
    """One prompt's continuations.

    Attributes:
        completions: one for each of the request's `n`, growing.
        num_cached: of the prompt's tokens, those whose KV was cached when the first continuation began; None while that
            is not known, or if there is no such cache.
    """

    def __init__(self, serving: Serving, job: Job, prompt: list[int]) -> None:
        self._engine = serving.engine
        self._job = job
        self.prompt = prompt
        self.num_cached: int | None = None
        tokenizer = serving.tokenizer
        self.completions = [
            Completion(index, job.params, None if tokenizer is None else tokenizer.stream())
            for index in range(job.params.n)
        ]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    async def follow(self) -> AsyncGenerator[list[Completion], None]:
        """The completions that have grown, each time that the engine says something. Closing it ends the request.

        Raises: RequestRejected, AdapterNotFound, EngineDead; ApiError: the request has failed.
        """
        num_open = len(self.completions)
        ended_here = False
        events = self._engine.generate(self.prompt, self._job.params, self._job.adapter, self._job.cache_salt)
        # Leaving an engine's iterator early ends the request; `aclosing` makes that now, not at some collection.
        async with aclosing(cast("AsyncGenerator[list[Event], None]", events)):
            async for batch in events:
                grown: dict[int, Completion] = {}
                for event in batch:
                    if isinstance(event, RequestWaiting):
                        continue
                    if not isinstance(event, TokenEvent):
                        break  # terminal, the last one
                    if event.start is not None and self.num_cached is None and self._engine.info.prefix_cache:
                        self.num_cached = event.start.num_cached
                    completion = self.completions[event.index]
                    if completion.finish_reason is not None:
                        continue  # computed in excess, before a stop string was found
                    grown[event.index] = completion
                    ended_here = completion.push(event)
                    if completion.finish_reason is not None:
                        num_open -= 1
                        if ended_here and num_open:
                            self._engine.abort(event.request_id, event.index)
                if grown:
                    yield list(grown.values())
                last = batch[-1]
                if isinstance(last, RequestFailed):
                    raise engine_failed(last.reason, alive=self._engine.is_alive)
                if isinstance(last, RequestAborted) and num_open:
                    raise engine_failed("the server has ended the request", alive=False)
                if ended_here and not num_open:
                    return

    async def finish(self) -> None:
        """Follow to the end."""
        async for _ in self.follow():
            pass


async def together(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the parts of a request side by side; the first one that fails ends the others, and is what is raised."""
    if len(parts) == 1:
        await parts[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
