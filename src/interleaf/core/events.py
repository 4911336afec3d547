"""What the engine says about requests. Every accepted request ends in exactly one terminal event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended: OpenAI's words, and `abort` for one that its caller ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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


class TokenEvent(msgspec.Struct, frozen=True):
    """One more token of sequence `index` of a request; the sequence's last one says why it ended.

    A msgspec struct, because one is made for every token: it takes a tenth of the time of a frozen dataclass.

    Attributes:
        stop_token: for FinishReason.STOP the token id that ended the sequence (it is also `token_id`).
    """

    request_id: str
    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: every sequence of the request ended by itself or was ended singly."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """Terminal: the caller ended the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: the request cannot be answered."""

    request_id: str
    reason: str


Event = TokenEvent | RequestFinished | RequestAborted | RequestFailed
