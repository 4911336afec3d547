"""What every endpoint needs: the engine, the tokenizer, the models' names, the places in the queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from interleaf.config import ServerConfig
from interleaf.engine.serving import AsyncEngine
from interleaf.engine.tokenizer import Tokenizer
from interleaf.server.errors import ApiError, bad_request, model_not_found
from interleaf.server.text import TokenTexts

_RETRY_AFTER_S = 1


@dataclass(slots=True)
class Queue:
    """Counts the sequences between their request's arrival and its end. One per server process.

    Attributes:
        capacity: sequences that run and wait at most.
        num_coming: requests whose turn to be looked at has not come.
    """

    capacity: int
    num_open: int = 0
    num_coming: int = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another request."""
        return self.num_open + self.num_coming >= self.capacity

    def refusal(self) -> ApiError:
        """What is said to those for whom there is no place."""
        return ApiError(
            429,
            f"the queue is full: {self.num_open + self.num_coming} sequences run or wait, at most {self.capacity} may; "
            "try again",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(_RETRY_AFTER_S)},
        )

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places. Raises: ApiError: 429 there are not that many now, 400 there never will be."""
        if count > self.capacity:
            raise bad_request(f"prompts x n must be at most {self.capacity} sequences, got {count}", "n")
        if self.num_open + count > self.capacity:
            raise self.refusal()
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count


@dataclass(slots=True)
class Serving:
    """One server over one engine; `app.state.serving` is it."""

    engine: AsyncEngine
    tokenizer: Tokenizer | None
    config: ServerConfig
    queue: Queue = field(init=False)
    texts: TokenTexts = field(init=False)
    started_s: int = field(init=False)

    def __post_init__(self) -> None:
        self.queue = Queue(self.engine.info.max_num_seqs + self.config.max_waiting)
        self.texts = TokenTexts(self.tokenizer)
        self.started_s = int(time.time())

    @property
    def base_name(self) -> str:
        return self.config.name

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a model's name stands for; None is the base model. Raises: ApiError: 404."""
        if model == self.base_name:
            return None
        if self.engine.has_adapter(model):
            return model
        raise model_not_found(model)

    def require_tokenizer(self, what: str, param: str) -> Tokenizer:
        """Raises: ApiError: 400, the model has no tokenizer."""
        if self.tokenizer is None:
            raise bad_request(f"{what}: the model has no tokenizer; give prompts as token ids", param)
        return self.tokenizer


def serving_of(request: Request) -> Serving:
    """The server that a request came to."""
    serving: Serving = request.app.state.serving
    return serving


def require_model(name: str | None) -> str:
    """Raises: ApiError: 400, the request names no model."""
    if name is None:
        raise bad_request(
            "model is required; GET /v1/models lists what is served", "model", "missing_required_parameter"
        )
    return name
