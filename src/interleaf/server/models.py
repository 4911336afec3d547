"""/v1/models, /version and /health: what is served here, and whether it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interleaf import __version__
from interleaf.server.errors import engine_failed, json_response
from interleaf.server.state import Serving, serving_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The base model, and the adapters by name: several are loaded at a time, in no particular order."""
    serving = serving_of(request)
    listed = [_model(serving, name) for name in (serving.base_name, *sorted(serving.engine.adapters()))]
    return json_response({"object": "list", "data": listed})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """One of them."""
    serving = serving_of(request)
    serving.adapter_of(model)
    return json_response(_model(serving, model))


@router.get("/version")
async def version() -> Response:
    """Interleaf's version."""
    return json_response({"version": __version__})


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests can be served, 503 when the engine has stopped."""
    if not serving_of(request).engine.is_alive:
        raise engine_failed("the engine has stopped", alive=False)
    return json_response({"status": "ok"})


def _model(serving: Serving, name: str) -> dict[str, Any]:
    base = serving.base_name
    return {
        "id": name,
        "object": "model",
        "created": serving.started_s,
        "owned_by": "interleaf",
        "root": name,
        "parent": None if name == base else base,
        "max_model_len": serving.engine.info.max_model_len,
    }
