"""The server's log: console lines or JSON objects, and one line per HTTP request. Knows no endpoint."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interleaf.config import LogFormat, LogLevel
from interleaf.server.metrics import Metrics
from interleaf.server.observed import ARRIVAL, Arrival, rounded

logger = logging.getLogger("interleaf.access")
_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked every few seconds by machines: logged at `debug` unless something is wrong."""
_MAX_PATH = 200


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Send this process's log to standard error, in one format whoever writes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("interleaf").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log_fields(**fields: object) -> dict[str, dict[str, object]]:
    """`extra=` of a log call: named values beside the message."""
    return {"fields": fields}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in _fields(record).items() if key not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class ConsoleFormatter(logging.Formatter):
    """Time, level, message, fields as key=value. Line breaks in a message are escaped: one record, one line."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_iso(record.created), f"{record.levelname:<7}", _one_line(record.getMessage())]
        words += [f"{key}={_one_line(_plain(value))}" for key, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class AccessLog:
    """Middleware: notes when a request arrived, and writes its line when its answer has ended.

    The line says method, path, status, seconds, and for generations adapter, tokens, time to the first token, why
    they ended and what they waited for; never a prompt, a text or a key.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = Arrival(request_id=scope.get("state", {}).get("request_id"))
        token = ARRIVAL.set(arrival)
        status: int | None = None

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            status = status or 500
            raise
        finally:
            ARRIVAL.reset(token)
            # Without a status the client had gone before there was an answer; 499 is nginx's word for that.
            self._metrics.responses[str(status or 499)] += 1
            _write_line(scope, arrival, status or 499)


def _write_line(scope: Scope, arrival: Arrival, status: int) -> None:
    path = scope["path"][:_MAX_PATH]
    level = logging.DEBUG if path in _QUIET_PATHS and status < 400 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "request_id": arrival.request_id,
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(time.perf_counter() - arrival.at_s, 4),
    }
    if arrival.num_generations:
        fields |= {
            "adapter": ",".join(arrival.adapters) or None,
            "prompt_tokens": arrival.prompt_tokens,
            "generation_tokens": arrival.generation_tokens,
            "ttft_s": None if arrival.first_token_s is None else round(arrival.first_token_s, 4),
            "finish_reason": ",".join(sorted(set(arrival.finish_reasons))) or None,
            "waited_for": rounded(arrival.waits),
        }
    logger.log(level, "request", extra=log_fields(**fields))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _iso(seconds: float) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{moment}.{int(seconds % 1 * 1000):03d}Z"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{item}" for key, item in value.items()) or "-"
    return "-" if value is None else str(value)


def _one_line(text: str) -> str:
    """A text without control characters: a stranger's words cannot forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
