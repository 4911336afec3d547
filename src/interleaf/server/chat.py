"""/v1/chat/completions: messages answered through the model's chat template. Knows this endpoint's shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interleaf.engine.output import Completion, CompletionDelta
from interleaf.server import neutral
from interleaf.server.errors import ApiError, bad_request
from interleaf.server.generation import Generation, Job, check_prompt
from interleaf.server.replies import Reply, as_json, chat_logprobs
from interleaf.server.request_id import request_id
from interleaf.server.schemas import MAX_LOGPROBS, ChatBody, ChatFields, Message, described, read_body
from interleaf.server.state import Serving, require_model, serving_of
from interleaf.server.streaming import answer
from interleaf.server.text import tokenised
from interleaf.server.turns import require_place

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles, and what templates call them. OpenAI's newer models renamed the system's."""
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio")
router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=described(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    require_place(request, serving.queue)
    body = await read_body(request, ChatBody)
    name = require_model(body.model)
    adapter = serving.adapter_of(name)
    neutral.refuse_requests_for_more(body, neutral.CHAT)
    include_usage = body.include_usage
    logprobs = _logprobs(body)
    prompt = await tokenised(
        len(await request.body()),
        lambda: chat_prompt(serving, body.messages, body.add_generation_prompt is not False),
    )
    check_prompt(serving.engine, prompt, 1, "messages")
    max_tokens = _max_tokens(body, serving.engine.info.max_model_len - len(prompt))
    params = body.sampling_params(max_tokens, logprobs)
    check_prompt(serving.engine, prompt, max_tokens, "messages")
    job = Job((prompt,), params, adapter, body.salt)
    reply = ChatReply(
        job,
        serving.texts,
        request_id=request_id(request),
        name=name,
        return_token_ids=bool(body.return_token_ids),
        include_usage=include_usage,
    )
    return await answer(request, serving, job, reply, stream=bool(body.stream))


class ChatReply(Reply):
    """Answers of this endpoint."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._after

    def opening(self, index: int, generation: Generation) -> bytes:
        """The assistant's turn begins."""
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if not self._return_token_ids:
            return self._as_chunk(choice)
        whole = {**self._identity, "prompt_token_ids": generation.prompt, "choices": [choice]}
        return b"data: " + as_json(whole | ({"usage": None} if self.include_usage else {})) + b"\n\n"

    def chunk(self, index: int, completion: Completion, delta: CompletionDelta) -> bytes:
        """See Reply."""
        if self._is_silent(completion, delta):
            return b""
        if completion.finish_reason is None and not self._is_detailed:
            content = as_json(delta.text)
            return b'%b{"index":%d,"delta":{"content":%b%b' % (self._before, index, content, self._plain_end)
        logprobs = None
        if self._logprobs is not None:
            logprobs = chat_logprobs(self._texts, delta.token_ids, delta.logprobs)
        choice = {
            "index": index,
            "delta": {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        return self._as_chunk(self._extended(choice, completion, delta.token_ids))

    def choice(self, index: int, completion: Completion, generation: Generation) -> dict[str, Any]:
        """See Reply."""
        logprobs = None
        if self._logprobs is not None:
            logprobs = chat_logprobs(self._texts, completion.token_ids, completion.logprobs)
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        return self._extended(choice, completion, completion.token_ids)

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """See Reply."""
        whole = super().whole(generations)
        if self._return_token_ids:
            whole["prompt_token_ids"] = generations[0].prompt
        return whole


def chat_prompt(serving: Serving, messages: Sequence[Message] | None, add_generation_prompt: bool) -> list[int]:
    """Token ids of a conversation. Raises: ApiError, RequestRejected: the template refuses it."""
    tokenizer = serving.require_tokenizer("messages", "messages")
    if messages is None:
        raise bad_request("messages is required", "messages", "missing_required_parameter")
    if not messages:
        raise bad_request("messages must hold at least 1 message, got 0", "messages")
    if not tokenizer.has_chat_template:
        raise bad_request("the model has no chat template; use /v1/completions", "messages")
    turns = [_turn(position, message) for position, message in enumerate(messages)]
    return tokenizer.apply_chat(turns, add_generation_prompt)


def _turn(position: int, message: Message) -> dict[str, str]:
    """A message as templates want it: a role, and one text."""
    place = f"messages[{position}]"
    for field in _TOOL_FIELDS:
        if getattr(message, field) not in (None, []):
            raise ApiError(
                400, f"{place}.{field} is not supported", param=f"{place}.{field}", code="unsupported_parameter"
            )
    if message.role not in _ROLES:
        raise bad_request(
            f"{place}.role must be one of {', '.join(_ROLES)}, got {message.role[:100]!r}", f"{place}.role"
        )
    content = message.content
    if content is None:
        raise bad_request(f"{place}.content is required", f"{place}.content", "missing_required_parameter")
    if not isinstance(content, str):
        for number, part in enumerate(content):
            if part.type != "text" or part.text is None:
                where = f"{place}.content[{number}]"
                raise bad_request(f'{where} must be {{"type": "text", "text": ...}}, got {part.type[:100]!r}', where)
        content = "".join(part.text or "" for part in content)
    return {"role": _ROLES[message.role], "content": content}


def _logprobs(body: ChatFields) -> int | None:
    """How many alternatives the engine shall give. Raises: ApiError."""
    top = body.top_logprobs
    if top is not None:
        if not 0 <= top <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be a whole number from 0 to {MAX_LOGPROBS}, got {top}", "top_logprobs"
            )
        if top and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return (top or 0) if body.logprobs else None


def _max_tokens(body: ChatFields, room: int) -> int:
    """Output tokens at most; all that the context has room for if the client does not say."""
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(f"max_completion_tokens={newer} contradicts max_tokens={older}", "max_completion_tokens")
    given = older if newer is None else newer
    if given is not None and given < 1:
        field = "max_tokens" if newer is None else "max_completion_tokens"
        raise bad_request(f"{field} must be a whole number >= 1, got {given}", field)
    return room if given is None else given
