"""The id of a request: the client's own X-Request-Id or a new one, in the scope for everybody and in the answer."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_MAX_LENGTH = 128


class RequestIdMiddleware:
    """Gives every request an id (`scope["state"]["request_id"]`) and every answer the header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        id_ = given if _is_usable(given) else secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = id_.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, id_)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id(request: Request) -> str:
    """The id that the middleware gave."""
    id_: str = request.scope["state"]["request_id"]
    return id_


def _is_usable(given: bytes) -> bool:
    """Whether an id may stand in a header and in a line of a log: printable ASCII, no spaces, not long."""
    return 0 < len(given) <= _MAX_LENGTH and all(0x21 <= byte <= 0x7E for byte in given)
