"""An answer in server-sent events, written straight to the ASGI server; and the one way all answers are made.

Status and headers wait for the engine's first words: a request that it refuses still gets its proper status.
"""

from __future__ import annotations

import logging
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from interleaf.server.connection import ClientGone, while_connected
from interleaf.server.errors import as_api_error, json_response
from interleaf.server.generation import Generation, Job, together
from interleaf.server.replies import DONE, Reply, as_json
from interleaf.server.state import Serving

_CLIENT_CLOSED_REQUEST = 499
logger = logging.getLogger(__name__)


async def answer(request: Request, serving: Serving, job: Job, reply: Reply, *, stream: bool) -> Response:
    """Run a request, and answer in one piece or as a stream. Raises: ApiError, InterleafError."""
    if stream:
        return EventStream(serving, job, reply)
    generations = [Generation(serving, job, prompt) for prompt in job.prompts]
    with serving.queue.places(job.num_sequences):
        try:
            await while_connected(request.receive, together([generation.finish() for generation in generations]))
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)  # for the log; nobody reads it
    return json_response(reply.whole(generations))


class EventStream(Response):
    """A stream of chunks: one for every choice each time that the engine says something of it, so one token each unless
    the engine is ahead of the client.

    Starlette's StreamingResponse costs an async generator and a task group more.
    """

    media_type = "text/event-stream"

    def __init__(self, serving: Serving, job: Job, reply: Reply) -> None:
        self.status_code = 200
        self.background = None
        # Proxies that gather answers before they pass them on (nginx) are told not to.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._serving = serving
        self._job = job
        self._reply = reply
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: whatever went wrong before the stream began; later it is told in the stream."""
        try:
            with self._serving.queue.places(self._job.num_sequences):
                await while_connected(receive, self._run(send))
        except ClientGone:
            return
        except Exception as error:
            if not self._has_started:
                raise
            told = as_api_error(error)
            if told is not error:
                logger.error("a stream failed", exc_info=error)
            await self._send(send, b"data: " + as_json(told.body()) + b"\n\n" + DONE, more=False)

    async def _run(self, send: Send) -> None:
        generations = [Generation(self._serving, self._job, prompt) for prompt in self._job.prompts]
        await together([self._relay(position, generation, send) for position, generation in enumerate(generations)])
        usage = self._reply.usage_chunk(generations) if self._reply.include_usage else b""
        await self._send(send, usage + DONE, more=False)

    async def _relay(self, position: int, generation: Generation, send: Send) -> None:
        """One prompt's chunks, all that is there in one write."""
        reply = self._reply
        unopened = {completion.index for completion in generation.completions}
        # A client may go while a chunk is on its way to it: the request ends then, not at some collection.
        async with aclosing(generation.follow()) as following:
            async for grown in following:
                parts = []
                for completion in grown:
                    index = reply.indexed(position, completion)
                    if completion.index in unopened:
                        unopened.discard(completion.index)
                        parts.append(reply.opening(index, generation))
                    parts.append(reply.chunk(index, completion, completion.take()))
                if body := b"".join(parts):
                    await self._send(send, body, more=True)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})
