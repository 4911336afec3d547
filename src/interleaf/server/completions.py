"""/v1/completions: a prompt, or several, as text or token ids, continued. Knows this endpoint's shapes only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interleaf.engine.output import Completion, CompletionDelta
from interleaf.server import neutral
from interleaf.server.errors import ApiError, bad_request
from interleaf.server.generation import Generation, Job, check_prompt
from interleaf.server.replies import Reply, as_json, completion_logprobs
from interleaf.server.request_id import request_id
from interleaf.server.schemas import MAX_LOGPROBS, CompletionBody, CompletionFields, described, read_body
from interleaf.server.state import Serving, require_model, serving_of
from interleaf.server.streaming import answer
from interleaf.server.text import tokenised
from interleaf.server.turns import require_place

_DEFAULT_MAX_TOKENS = 16
router = APIRouter()


@router.post("/v1/completions", openapi_extra=described(CompletionBody))
async def create_completion(request: Request) -> Response:
    """Continue a prompt."""
    serving = serving_of(request)
    require_place(request, serving.queue)
    body = await read_body(request, CompletionBody)
    name = require_model(body.model)
    adapter = serving.adapter_of(name)
    neutral.refuse_requests_for_more(body, neutral.COMPLETION)
    include_usage = body.include_usage
    _check_fields(body)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(max_tokens, body.logprobs)
    if params.stop:
        serving.require_tokenizer("stop", "stop")
    texts = _prompts(serving, body)
    prompts = await tokenised(len(await request.body()), lambda: _encoded(serving, texts, body))
    for prompt in prompts:
        check_prompt(serving.engine, prompt, max_tokens, "prompt")
    job = Job(prompts, params, adapter, body.salt)
    reply = CompletionReply(
        job,
        serving.texts,
        request_id=request_id(request),
        name=name,
        # Without a tokenizer the ids are all that there is to say.
        return_token_ids=serving.tokenizer is None if body.return_token_ids is None else body.return_token_ids,
        include_usage=include_usage,
    )
    if body.echo:
        reply.echo(tuple(serving.texts.joined(p) if isinstance(p, list) else p for p in texts))
    return await answer(request, serving, job, reply, stream=bool(body.stream))


class CompletionReply(Reply):
    """Answers of this endpoint."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echoed: tuple[str, ...] = ()
        self._offsets: dict[int, int] = {}
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._after

    def echo(self, prompts: tuple[str, ...]) -> None:
        """Begin each choice with its prompt's text."""
        self._echoed = prompts

    def opening(self, index: int, generation: Generation) -> bytes:
        """The echoed prompt and its token ids, as far as they were asked for."""
        if not self._echoed and not self._return_token_ids:
            return b""
        choice = {"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}
        if self._return_token_ids:
            choice |= {"prompt_token_ids": generation.prompt, "token_ids": []}
        return self._as_chunk(choice)

    def chunk(self, index: int, completion: Completion, delta: CompletionDelta) -> bytes:
        """See Reply."""
        if self._is_silent(completion, delta):
            return b""
        if completion.finish_reason is None and not self._is_detailed:
            return b'%b{"index":%d,"text":%b%b' % (self._before, index, as_json(delta.text), self._plain_end)
        logprobs = None
        if self._logprobs is not None:
            offset = self._offsets.get(index, len(self._echo(index)))
            logprobs = completion_logprobs(self._texts, delta.token_ids, delta.logprobs, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        return self._as_chunk(self._extended(choice, completion, delta.token_ids))

    def choice(self, index: int, completion: Completion, generation: Generation) -> dict[str, Any]:
        """See Reply."""
        echoed = self._echo(index)
        logprobs = None
        if self._logprobs is not None:
            logprobs = completion_logprobs(self._texts, completion.token_ids, completion.logprobs, len(echoed))
        choice = {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if self._return_token_ids:
            choice["prompt_token_ids"] = generation.prompt
        return self._extended(choice, completion, completion.token_ids)

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""


def _check_fields(body: CompletionFields) -> None:
    """Raises: ApiError: fields contradict each other, or ask for what is not here."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise bad_request(f"logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {body.logprobs}", "logprobs")
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs asks for log-probabilities of the prompt, which are not available"
        raise ApiError(400, message, param="echo", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        message = f"best_of is not supported: only n itself is accepted, got {body.best_of}"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")


def _prompts(serving: Serving, body: CompletionFields) -> list[str | list[int]]:
    """The prompts, each a text or token ids. Raises: ApiError: there are none, or kinds are mixed."""
    prompt = body.prompt
    if prompt is None:
        raise bad_request("prompt is required", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise bad_request("prompt must be a text, token ids, or a list of either; got a mixture", "prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > serving.queue.capacity:  # before any of them is tokenised
        raise bad_request(f"prompt must hold at most {serving.queue.capacity} prompts, got {len(prompt)}", "prompt")
    return prompt  # type: ignore[return-value]


def _encoded(serving: Serving, prompts: list[str | list[int]], body: CompletionFields) -> tuple[list[int], ...]:
    """Token ids of all prompts."""
    special = body.add_special_tokens is not False
    return tuple(
        prompt
        if isinstance(prompt, list)
        else serving.require_tokenizer("prompt", "prompt").encode(prompt, add_special_tokens=special)
        for prompt in prompts
    )
