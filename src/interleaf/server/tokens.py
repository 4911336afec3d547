"""/tokenize and /detokenize, as vLLM has them: text to the ids that a prompt would have, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interleaf.server.chat import chat_prompt
from interleaf.server.errors import bad_request, json_response
from interleaf.server.schemas import DetokenizeBody, TokenizeBody, described, read_body
from interleaf.server.state import serving_of
from interleaf.server.text import tokenised

router = APIRouter()


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a chat's messages."""
    serving = serving_of(request)
    body = await read_body(request, TokenizeBody)
    if body.model is not None:
        serving.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")

    def work() -> dict[str, Any]:
        if body.prompt is None:
            ids = chat_prompt(serving, body.messages, body.add_generation_prompt is not False)
        else:
            tokenizer = serving.require_tokenizer("prompt", "prompt")
            ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": serving.engine.info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [serving.texts[id_] for id_ in ids]
        return found

    return json_response(await tokenised(len(await request.body()), work))


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special ones written out."""
    serving = serving_of(request)
    body = await read_body(request, DetokenizeBody)
    if body.model is not None:
        serving.adapter_of(body.model)
    tokenizer = serving.require_tokenizer("tokens", "tokens")
    vocab = serving.engine.info.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab:
        raise bad_request(f"tokens must be token ids from 0 to {vocab - 1}", "tokens")
    text = await tokenised(len(await request.body()), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})
