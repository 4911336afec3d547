"""Who may call what: API keys for everybody's endpoints, and who may change the set of adapters. Knows no user."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Sequence

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from interleaf.server.refusal import refusal

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class ApiKeys:
    """The keys that open the server. Comparing takes the same time wherever a guess goes wrong, and for every key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def opens(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries one of the keys."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever matches
        return any(matches) and scheme.lower() == "bearer"


class RequireKey:
    """Middleware: without a key every path answers 401, but for the open ones and for CORS preflights.

    Args:
        open_paths: exact paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not self._is_open(scope):
            values = [value for name, value in scope["headers"] if name == b"authorization"]
            header = values[0].decode("utf-8", "surrogateescape") if len(values) == 1 else None
            if not self._keys.opens(header):
                what = "a wrong API key" if values else "no API key"
                message = f"{what} was given; send it as `Authorization: Bearer KEY`"
                response = refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in dict(scope["headers"])
        return is_preflight or scope["path"] in self._open_paths


def why_not_admin(request: Request, keys: ApiKeys, *, allow_runtime_loading: bool) -> str | None:
    """Why this client may not load or unload adapters; None if it may.

    With keys the middleware has already asked for one. Without, the client must sit on this machine: not behind a
    proxy, which makes everybody look local, and not a web page that a browser here has open.
    """
    if keys:
        return None
    if not allow_runtime_loading:
        return (
            "loading at run time needs an API key (--api-key), or --allow-runtime-loading for clients on this machine"
        )
    headers = request.headers
    if not _is_loopback(request.client.host if request.client else ""):
        return "without an API key only clients on this machine may load and unload adapters"
    if any(name in headers for name in _PROXY_HEADERS):
        return "the request came through a proxy: set an API key to load and unload adapters from elsewhere"
    if "origin" in headers or not _names_loopback(headers):
        return "the request comes from a web page: set an API key to load and unload adapters from there"
    return None


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _names_loopback(headers: Headers) -> bool:
    host = headers.get("host", "")
    return (host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host) in _LOOPBACK_NAMES
