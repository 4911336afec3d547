"""Answers as JSON: what completions and chats have in common. Knows OpenAI's shapes, not HTTP.

Chunks of a stream are put together from bytes made once per stream and a text made JSON; only what is rare (the last
chunk, log-probabilities, token ids) goes through a dictionary.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from interleaf.core import TokenLogprobs
from interleaf.engine.output import Completion, CompletionDelta
from interleaf.server.generation import Generation, Job
from interleaf.server.text import TokenTexts

as_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come; JSON has no infinity."""


class Reply(ABC):
    """One request's answer.

    Args:
        name: the model that serves the request.
        return_token_ids: give the prompt's and the output's token ids, as vLLM does.
        include_usage: a stream ends with a chunk of counts, and every other chunk has a null in their place.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        job: Job,
        texts: TokenTexts,
        *,
        request_id: str,
        name: str,
        return_token_ids: bool = False,
        include_usage: bool = False,
    ) -> None:
        self._texts = texts
        self._n = job.params.n
        self._logprobs = job.params.logprobs
        self._return_token_ids = return_token_ids
        self.include_usage = include_usage
        self._identity = {
            "id": f"{self.id_prefix}-{request_id}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": name,
        }
        # {"id":...,"choices":[  CHOICE  ]}
        self._before = b"data: " + as_json(self._identity)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @abstractmethod
    def opening(self, index: int, generation: Generation) -> bytes:
        """Chunks that begin a choice's stream, before its first token."""

    @abstractmethod
    def chunk(self, index: int, completion: Completion, delta: CompletionDelta) -> bytes:
        """What a choice has gained; b"" if a client would see nothing of it."""

    @abstractmethod
    def choice(self, index: int, completion: Completion, generation: Generation) -> dict[str, Any]:
        """A finished choice."""

    def indexed(self, position: int, completion: Completion) -> int:
        """A choice's number: prompts in order, the continuations of each."""
        return position * self._n + completion.index

    def usage_chunk(self, generations: Sequence[Generation]) -> bytes:
        """The chunk that ends a stream with counts."""
        return b"data: " + as_json({**self._identity, "choices": [], "usage": usage(generations)}) + b"\n\n"

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self.choice(self.indexed(position, completion), completion, generation)
            for position, generation in enumerate(generations)
            for completion in generation.completions
        ]
        return {**self._identity, "object": self.whole_object, "choices": choices, "usage": usage(generations)}

    def _is_silent(self, completion: Completion, delta: CompletionDelta) -> bool:
        """Whether a chunk would hold nothing. Without a tokenizer every token has one, as a sign of life."""
        said = delta.text or self._is_detailed or completion.finish_reason is not None
        return not said and self._texts.has_tokenizer

    @property
    def _is_detailed(self) -> bool:
        return self._logprobs is not None or self._return_token_ids

    def _extended(self, choice: dict[str, Any], completion: Completion, token_ids: Sequence[int]) -> dict[str, Any]:
        """A choice with vLLM's fields."""
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self._return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def _as_chunk(self, choice: dict[str, Any]) -> bytes:
        return self._before + as_json(choice) + self._after


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """OpenAI's counts. Tokens that a stop string's end left uncounted are not output.

    Cached tokens are told only where there is a cache, so that 0 means that nothing was found.
    """
    prompt = sum(len(generation.prompt) for generation in generations)
    output = sum(generation.num_output_tokens for generation in generations)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output
    }  # fmt: skip
    cached = [generation.num_cached for generation in generations if generation.num_cached is not None]
    if cached:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return counts


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """The shape of /v1/completions: four lists side by side.

    Args:
        offset: characters of the choice's text before the first of these tokens.
    """
    offsets, tops = [], []
    for token, entry in zip(token_ids, entries, strict=True):
        offsets.append(offset)
        offset += len(texts[token])
        top: dict[str, float] = {}
        for id_, value in (*zip(entry.top_ids, entry.top, strict=True), (token, entry.chosen)):
            top.setdefault(texts[id_], _finite(value))  # of two tokens with one text the more probable one stays
        tops.append(top)
    return {
        "tokens": [texts[token] for token in token_ids],
        "token_logprobs": [_finite(entry.chosen) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The shape of /v1/chat/completions: a list of tokens, each with its alternatives."""

    def shown(token: int, value: float) -> dict[str, Any]:
        return {"token": texts[token], "logprob": _finite(value), "bytes": texts.raw_bytes(token)}

    content = [
        {
            **shown(token, entry.chosen),
            "top_logprobs": [shown(id_, value) for id_, value in zip(entry.top_ids, entry.top, strict=True)],
        }
        for token, entry in zip(token_ids, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return max(value, _LEAST_LOGPROB)
