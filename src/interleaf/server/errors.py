"""What a client is told when something is wrong: OpenAI's error shape, and the one map from our errors to statuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interleaf.errors import (
    AdapterError,
    AdapterNameTaken,
    AdapterNotFound,
    AdapterRejected,
    AdaptersUnavailable,
    EngineDead,
    InterleafError,
    InvalidSamplingParams,
    PoolTooSmall,
    RequestRejected,
)
from interleaf.server.refusal import error_body

_MAX_MESSAGE = 2000
"""Characters of a message at most: a client's own words may be quoted in it."""

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status; OpenAI's clients choose the exception's class by it.
        param: the field that is at fault, as a path ("messages[0].content").
        code: a stable word for programs ("model_not_found").
        headers: more headers of the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The answer's content."""
        return error_body(self.status, self.message, code=self.code, param=self.param)


def error_response(error: ApiError) -> Response:
    """The whole answer; middleware that refuses a request sends this, too."""
    return json_response(error.body(), error.status, error.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON, from anything that msgspec can write."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is neither the base nor an adapter."""
    return ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")


def engine_failed(reason: str, *, alive: bool) -> ApiError:
    """An accepted request could not be answered: 503 if the engine has stopped, else 500."""
    return ApiError(500 if alive else 503, reason, code="request_failed" if alive else "engine_dead")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception. Those that nobody expected say nothing of the inside."""
    match error:
        case ApiError():
            return error
        case InvalidSamplingParams():  # its message begins with the parameter's name
            return bad_request(str(error), param=str(error).split(" ", 1)[0])
        case RequestRejected():
            return bad_request(str(error))
        case AdapterNotFound():
            return model_not_found(error.name)
        case AdapterNameTaken():
            return bad_request(str(error), "lora_name", "adapter_name_taken")
        case AdapterRejected() | PoolTooSmall():
            return bad_request(str(error), "lora_path", "adapter_rejected")
        case EngineDead():
            return engine_failed(str(error), alive=False)
        case AdaptersUnavailable():
            return ApiError(503, str(error), code="adapters_unavailable", headers={"Retry-After": "1"})
        case AdapterError():
            return ApiError(500, str(error), code="adapter_failed")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return ApiError(500, "the server failed to answer this request", code="internal_error")


class AnswerFailures:
    """Middleware: an exception that nobody expected is logged, and answered if nothing has been sent.

    Starlette would do so outside of all middleware, where the answer lacks its request's id and its line in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noting_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            logger.error("a request failed: %s %s", scope["method"], scope["path"], exc_info=error)
            await error_response(as_api_error(error))(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Every error of every route leaves in the one shape. To be called before other middleware is added."""

    async def expected(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            what = f"{request.method} {request.url.path}"
            told = ApiError(error.status_code, f"there is no {what[:200]!r}", headers=error.headers)
        else:
            told = as_api_error(error)
        return error_response(told)

    for kind in (ApiError, InterleafError, HTTPException):
        app.add_exception_handler(kind, expected)
    app.add_middleware(AnswerFailures)
