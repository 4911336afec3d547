"""Puts the HTTP application together. Knows every endpoint's module and no endpoint's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from interleaf import __version__
from interleaf.config import ServerConfig
from interleaf.engine.serving import AsyncEngine
from interleaf.engine.tokenizer import Tokenizer
from interleaf.server.chat import router as chat
from interleaf.server.completions import router as completions
from interleaf.server.errors import install_error_handlers
from interleaf.server.models import router as models
from interleaf.server.request_id import RequestIdMiddleware
from interleaf.server.schemas import COMPONENTS
from interleaf.server.state import Serving
from interleaf.server.tokens import router as tokens

Extension = Callable[[FastAPI, Serving], None]
"""Adds routes and middleware to an application before it starts; middleware should be plain ASGI, for streams' sake."""


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer | None,
    config: ServerConfig,
    extensions: Sequence[Extension] = (),
) -> FastAPI:
    """The application over a running engine, which stays its caller's to close.

    Args:
        tokenizer: None for a model without one: prompts are token ids then, and answers have no text.
        extensions: called in order; the last one's middleware sees a request first, after the request id's.
    """
    # No pages that fetch scripts from elsewhere; the schema itself is at /openapi.json.
    app = FastAPI(title="Interleaf", version=__version__, docs_url=None, redoc_url=None)
    serving = app.state.serving = Serving(engine, tokenizer, config)
    install_error_handlers(app)
    for router in (models, completions, chat, tokens):
        app.include_router(router)
    for extend in extensions:
        extend(app, serving)
    app.add_middleware(RequestIdMiddleware)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, object]:
    """FastAPI's description of the routes, with the bodies' schemas that msgspec knows."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(COMPONENTS)
        app.openapi_schema = schema
    return app.openapi_schema
