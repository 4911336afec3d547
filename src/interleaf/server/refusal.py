"""An error answer in OpenAI's shape, for whoever must refuse before any endpoint runs. Knows no exception."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, object]:
    """The JSON object of an error; `type` follows from the status, as OpenAI's clients know it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    problems: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer.

    Args:
        problems: everything that was found wrong, where it is more than one thing; given beside the message.
    """
    body = error_body(status, message, code=code, param=param)
    if problems:
        body["error"]["problems"] = list(problems)  # type: ignore[index]
    return Response(json.dumps(body), status, dict(headers or {}), media_type="application/json")
