"""What an operator wants around the endpoints: keys, limits, CORS, adapters at run time, metrics, the access log.

Middleware, outermost first: access log, CORS, keys, turns, body limits. So every answer is logged, a refusal can be
read by an allowed web page, and a stranger without a key has no place in the queue and no byte of a body read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from interleaf.config import ServerConfig
from interleaf.server.adapters import adapters_router
from interleaf.server.auth import ApiKeys, RequireKey
from interleaf.server.last_stats import LastStats
from interleaf.server.limits import LimitBody
from interleaf.server.logs import AccessLog
from interleaf.server.metrics import CONTENT_TYPE, Metrics
from interleaf.server.roots import AdapterRoots
from interleaf.server.totals import Totals
from interleaf.server.turns import Turns

if TYPE_CHECKING:
    from interleaf.server.app import Extension
    from interleaf.server.state import Serving


def operation(config: ServerConfig, metrics: Metrics, totals: Totals) -> Extension:
    """The extension of `create_app` that makes a server fit to be run.

    Args:
        metrics: what the application's engine is observed into (`ObservedEngine`).
        totals: what /metrics tells.

    Raises: ConfigError: an adapter root is no folder.
    """
    keys = ApiKeys(config.api_key)
    roots = AdapterRoots(config.allow_adapter_root, config.adapters_dir, allow_dummy=config.allow_dummy_adapters)
    open_paths = {"/health"} | (set() if config.protect_metrics else {"/metrics"})

    def extend(app: FastAPI, serving: Serving) -> None:
        last_stats = LastStats(serving.engine)
        app.include_router(
            adapters_router(
                serving.engine,
                roots,
                keys,
                allow_runtime_loading=config.allow_runtime_loading,
                reserved_names=(config.name,),
            )
        )

        @app.get("/metrics")
        async def page(request: Request) -> Response:
            """Everything that Prometheus wants to know."""
            snapshot = await last_stats.look()
            return Response(totals.sum().exposition(snapshot), media_type=CONTENT_TYPE)

        app.add_middleware(LimitBody, max_bytes=config.max_body, timeout_s=config.body_timeout)
        app.add_middleware(Turns, queue=serving.queue)
        app.add_middleware(RequireKey, keys=keys, open_paths=open_paths)
        if config.cors_origin:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=config.cors_origin,
                allow_methods=("GET", "POST"),
                allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
                expose_headers=("X-Request-Id", "Retry-After"),
            )
        app.add_middleware(AccessLog, metrics=metrics)

    return extend
