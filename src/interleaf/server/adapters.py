"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. Checks who asks; the engine loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from interleaf.engine.serving import AsyncEngine
from interleaf.errors import AdapterNotFound, AdapterRejected
from interleaf.server.auth import ApiKeys, why_not_admin
from interleaf.server.errors import ApiError
from interleaf.server.refusal import refusal
from interleaf.server.roots import AdapterRoots

_MAX_LOADS = 16
"""Loads on their way at a time; more are answered 429, so that nobody can pile them up."""
_NEUTRAL = {"load_inplace": (False, None), "lora_int_id": (None,), "base_model_name": (None,)}
"""vLLM's other fields, and the values that ask for nothing."""


def adapters_router(
    engine: AsyncEngine,
    roots: AdapterRoots,
    keys: ApiKeys,
    *,
    allow_runtime_loading: bool,
    reserved_names: Collection[str],
) -> APIRouter:
    """The two endpoints. Errors leave through the application's handlers (`server/errors.py`).

    Args:
        reserved_names: names of the base model, which no adapter may take.
    """
    router = APIRouter()
    num_loading = 0

    async def admin_fields(request: Request, *names: str) -> dict[str, str]:
        """The body's text fields. Raises: ApiError."""
        reason = why_not_admin(request, keys, allow_runtime_loading=allow_runtime_loading)
        if reason is not None:
            raise ApiError(403, reason, code="loading_not_allowed")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON, with `Content-Type: application/json`")
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None
        problems = _field_problems(body, names)
        if problems:
            raise ApiError(400, "; ".join(problems))
        return {name: body[name] for name in names}

    @router.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        """Register an adapter from a folder inside an allowed root; running requests go on meanwhile."""
        nonlocal num_loading
        fields = await admin_fields(request, "lora_name", "lora_path")
        name = fields["lora_name"]
        if name in reserved_names:
            raise ApiError(400, f"the name {name!r} is the base model's", code="adapter_name_taken", param="lora_name")
        if num_loading >= _MAX_LOADS:
            message = f"{_MAX_LOADS} adapters are being loaded, which is the limit; try again"
            raise ApiError(429, message, headers={"Retry-After": "1"})
        num_loading += 1
        try:
            await engine.load_adapter(name, await asyncio.to_thread(roots.resolve, fields["lora_path"]))
        except AdapterRejected as error:
            return refusal(400, str(error), code="adapter_rejected", param="lora_path", problems=error.problems)
        finally:
            num_loading -= 1
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        """Take a name away; requests that run with the adapter end as they would have."""
        name = (await admin_fields(request, "lora_name"))["lora_name"]
        try:
            await engine.unload_adapter(name)
        except AdapterNotFound as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _field_problems(body: Any, names: tuple[str, ...]) -> list[str]:
    """Everything that is wrong with the fields of a body."""
    if not isinstance(body, dict):
        return ["the body must be a JSON object"]
    problems = []
    for name in names:
        if name not in body:
            problems.append(f"{name} is missing")
        elif not isinstance(body[name], str) or not body[name]:
            problems.append(f"{name} must be a text that is not empty")
        elif not _is_unicode(body[name]):
            problems.append(f"{name} must be valid Unicode, got {body[name][:100]!r}")
    for name, value in body.items():
        if name in names:
            continue
        if name not in _NEUTRAL:
            problems.append(f"unknown field {name[:100]!r}; known: {', '.join(names)}")
        elif value not in _NEUTRAL[name]:
            problems.append(f"{name} is not supported")
    return problems[:20]


def _is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: JSON can spell halves of characters (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
