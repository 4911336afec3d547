"""What the engine says about requests. Every accepted request ends in exactly one terminal event."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended: OpenAI's words, and `abort` for one that its caller ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class AdapterFound(StrEnum):
    """Where a sequence's adapter was when the sequence was first considered.

    HIT: in the pool.   LATE: on its way, sent for ahead of need.   MISS: elsewhere, or sent for since.
    """

    HIT = "hit"
    LATE = "late"
    MISS = "miss"


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence came to its first seat. Told once, with its first token.

    Attributes:
        queue_s: seconds from the request's arrival at the engine until then.
        num_cached: prompt tokens whose KV was found in the prefix cache.
        found: of its adapter; None for the base model.
        load_s: it is the first to use its adapter since that came to the pool: seconds that this took.
        waits: `queue_s` by what it waited for, in words; what is not named is 0.
    """

    queue_s: float
    num_cached: int = 0
    found: AdapterFound | None = None
    load_s: float | None = None
    waits: dict[str, float] = {}


class RequestWaits(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a request's sequences have waited, summed by what for, beside what their starts have told.

    Attributes:
        first: for the first seat, of sequences that have had no token.
        again: for another seat, of sequences that had lost one.
    """

    first: dict[str, float] = {}
    again: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one output position.

    Attributes:
        chosen: of the token that was chosen.
        rank: how many tokens were at least as probable as the chosen one, itself included.
        top_ids, top: the most probable tokens, most probable first, and their log-probabilities.
    """

    chosen: float
    rank: int
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One more token of sequence `index` of a request; the sequence's last one says why it ended.

    A msgspec struct, because one is made for every token: it takes a tenth of the time of a frozen dataclass.

    Attributes:
        stop_token: for FinishReason.STOP the token id that ended the sequence (it is also `token_id`).
        start: with the sequence's first token, how it began.
    """

    request_id: str
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    start: SequenceStart | None = None


@dataclass(frozen=True, slots=True)
class RequestWaiting:
    """The request has waited for long and has had no seat yet. Told once, and only to those who asked to be told.

    Attributes:
        reason: what it waits for, in words.
        waits: what it has waited for so far, in seconds.
    """

    request_id: str
    waited_s: float
    reason: str
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: every sequence of the request ended by itself or was ended singly."""

    request_id: str
    waits: RequestWaits | None = None


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """Terminal: the caller ended the request."""

    request_id: str
    waits: RequestWaits | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: the request cannot be answered."""

    request_id: str
    reason: str
    waits: RequestWaits | None = None


Event = TokenEvent | RequestWaiting | RequestFinished | RequestAborted | RequestFailed

NOT_TERMINAL = (TokenEvent, RequestWaiting)
"""Events after which a request goes on."""
