"""What HTTP costs: streams from an engine that answers at once, the load generator beside the server. Reports ratios.

    python -m bench.http [--streams N] [--tokens N] [--rounds N] [--endpoint chat|completions] [--json PATH]

The server is a process of its own, one per variant: as shipped, without what surrounds the endpoints ("bare"), and
bare with one part replaced by what it was measured against. Every round runs all variants once, in turn. The null
engine gives every stream one token per turn of the event loop, so a chunk holds one token unless the server falls
behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.responses import StreamingResponse

from interleaf.config import ServerConfig
from interleaf.engine.tokenizer import load_tokenizer
from interleaf.server import chat, completions, streaming
from interleaf.server.api import http_server
from interleaf.server.app import create_app
from tests.support.null_engine import NullEngine

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The sea is wide, and nobody who has seen it from a small boat in October calls it blue without a reason. "


# ---------------------------------------------------------------- what is measured against


class _StarletteStream(streaming.EventStream):
    """Starlette's StreamingResponse around an async generator, fed through the same code."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def gather(message: Any) -> None:
            if message["type"] == "http.response.body":
                queue.put_nowait(message["body"])
                if not message["more_body"]:
                    queue.put_nowait(None)

        async def chunks() -> AsyncIterator[bytes]:
            running = asyncio.ensure_future(self._run(gather))
            while (chunk := await queue.get()) is not None:
                yield chunk
            await running

        with self._serving.queue.places(self._job.num_sequences):
            await StreamingResponse(chunks(), headers={}, media_type="text/event-stream")(scope, receive, send)


def _models_per_chunk() -> None:
    """Chunks as pydantic models, field by field, as OpenAI's own types are."""
    from openai.types import Completion as CompletionChunk
    from openai.types.chat import ChatCompletionChunk

    for kind, model in ((chat.ChatReply, ChatCompletionChunk), (completions.CompletionReply, CompletionChunk)):

        def chunk(self: Any, index: int, completion: Any, delta: Any, model: Any = model) -> bytes:
            text: dict[str, Any] = (
                {"delta": {"content": delta.text}} if self.id_prefix == "chatcmpl" else {"text": delta.text}
            )
            choice = {"index": index, "finish_reason": completion.finish_reason, "logprobs": None, **text}
            filled = (
                model.model_validate({**self._identity, "choices": [choice]})
                if self.id_prefix == "chatcmpl"
                else (model.model_construct(**self._identity, choices=[choice]))
            )
            return b"data: " + filled.model_dump_json().encode() + b"\n\n"

        kind.chunk = chunk  # type: ignore[method-assign]


def _replace(variant: str) -> dict[str, Any]:
    """Replace one part of this process's server. Returns: options for uvicorn."""
    if variant == "starlette":
        streaming.EventStream = _StarletteStream  # type: ignore[misc]
    elif variant == "models":
        _models_per_chunk()
    elif variant in ("asyncio", "shipped"):  # `interleaf serve` runs on asyncio's loop
        return {"loop": "asyncio", "http": "httptools"}
    elif variant == "h11":
        return {"loop": "uvloop", "http": "h11"}
    return {"loop": "uvloop", "http": "httptools"}


VARIANTS = ("bare", "shipped", "starlette", "models", "asyncio", "h11")


def serve(variant: str, model: str, port: int) -> None:
    """The server's process."""
    options = _replace(variant)
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)

    async def run() -> None:
        engine = NullEngine(lambda prompt, index: tokens, vocab_size=tokenizer.vocab_size, max_num_seqs=4096)
        config = ServerConfig(model="null", port=port, max_waiting=4096)
        if variant == "shipped":
            await http_server(engine, tokenizer, config).serve()
            return
        app = create_app(engine, tokenizer, config)
        await uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, **options)
        ).serve()

    (uvloop.run if options["loop"] == "uvloop" else asyncio.run)(run())


# ---------------------------------------------------------------- load


class _Stream(asyncio.Protocol):
    """One connection: sends a request, counts what comes until the stream ends. Parses as little as it can."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self.chunks = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: {")
        self._tail = (self._tail + data)[-400:]
        if b"data: [DONE]" in self._tail and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the stream broke: {self._tail!r}"))

    @property
    def tokens(self) -> int:
        return int(self._tail.split(b'"completion_tokens":')[1].split(b",")[0])


@dataclass(frozen=True, slots=True)
class Run:
    """One variant in one round.

    Attributes:
        cpu_us_per_token: CPU time of the server's process, which other load on the machine changes less.
    """

    tokens_per_s: float
    cpu_us_per_token: float
    tokens_per_chunk: float


async def load(port: int, pid: int, endpoint: str, streams: int, tokens: int) -> Run:
    """All streams at once, from the first request's bytes to the last stream's end."""
    body: dict[str, Any] = {"model": "null", "max_tokens": tokens, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    path = "/v1/completions"
    if endpoint == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Where is the sea?"}]
    else:
        body["prompt"] = "Where is the sea?"
    content = json.dumps(body).encode()
    fields = f"host: bench\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
    loop = asyncio.get_running_loop()
    begin, cpu_begin = time.perf_counter(), cpu_s(pid)

    async def stream() -> _Stream:
        done: asyncio.Future[None] = loop.create_future()
        transport, protocol = await loop.create_connection(
            lambda: _Stream(head.encode() + content, done), "127.0.0.1", port
        )
        await done
        transport.close()
        return protocol

    finished = await asyncio.gather(*(stream() for _ in range(streams)))
    seconds, cpu = time.perf_counter() - begin, cpu_s(pid) - cpu_begin
    total = sum(s.tokens for s in finished)
    assert total == streams * tokens, f"{total} tokens came, {streams * tokens} were asked for"
    # A chat's first chunk (its role) and every stream's last (its counts) hold no token.
    empty = 2 if endpoint == "chat" else 1
    return Run(total / seconds, 1e6 * cpu / total, total / (sum(s.chunks for s in finished) - empty * streams))


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(port: int) -> None:
    """Until the server answers."""
    import urllib.request

    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} after 60 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="for its tokenizer")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.port)
        return
    variants = args.variants.split(",")
    ports = {variant: args.port + offset for offset, variant in enumerate(variants)}
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.http", "--serve", variant, "--model", args.model, "--port", str(port)]
        )
        for variant, port in ports.items()
    ]
    try:
        for port in ports.values():
            wait_for(port)
        runs: dict[str, list[Run]] = {variant: [] for variant in variants}
        for turn in range(args.rounds + 1):
            for (variant, port), server in zip(ports.items(), servers, strict=True):
                run = uvloop.run(load(port, server.pid, args.endpoint, args.streams, args.tokens))
                if turn:  # the first round warms up
                    runs[variant].append(run)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()

    def least_cpu(variant: str) -> float:
        """Over the rounds: what else runs on the machine can only add."""
        return min(run.cpu_us_per_token for run in runs[variant])

    print(
        f"{args.streams} {args.endpoint} streams of {args.tokens} tokens, {args.rounds} rounds, {os.cpu_count()} cores"
    )
    for variant in variants:
        speeds = [run.tokens_per_s for run in runs[variant]]
        print(
            f"{variant:10} {statistics.median(speeds):6.0f} tokens/s ({min(speeds):.0f}-{max(speeds):.0f}), "
            f"{statistics.median(run.tokens_per_chunk for run in runs[variant]):.2f} tokens a chunk, "
            f"{least_cpu(variant):.1f} us of CPU a token, "
            f"{least_cpu(variant) / least_cpu(variants[0]):.2f} of {variants[0]}'s"
        )
    if args.json:
        args.json.write_text(json.dumps({v: [asdict(r) for r in rs] for v, rs in runs.items()}, indent=1))


if __name__ == "__main__":
    main()
