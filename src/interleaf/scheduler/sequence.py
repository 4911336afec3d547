"""One sequence on its way through the scheduler, which alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from interleaf.core import AdapterUid, FinishReason, Request
from interleaf.memory.allocator import OwnerKind, PageOwner


class SequenceState(Enum):
    """WAITING has no seat; PREFILL and DECODE have one; DRAINING has its last token in flight; ENDED is over."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAINING = "draining"
    ENDED = "ended"


class WaitReason(Enum):
    """Why a waiting sequence has not started."""

    QUEUED = "queued"
    SEATS = "seats"
    TOKEN_BUDGET = "token budget"
    PAGES = "pages"
    ADAPTER_FETCH = "adapter is read from disk"
    ADAPTER_LOAD = "adapter is copied to the pool"
    LAST_TOKEN = "its last token is in flight"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's prompt and one of its continuations.

    Attributes:
        order: its place in the order of arrival.
        token_ids: the prompt and every output token that has been committed.
        pages: its KV pages, in order of position.
        num_computed: positions whose KV the planned steps have written; up to one step ahead of what is committed.
        num_planned: output tokens that the planned steps sample; likewise.
        num_in_flight: tokens sampled by steps that have not been committed.
        considered: whether the state of its adapter has been counted as a hit or a miss.
    """

    request: Request
    index: int
    seed: int
    order: int
    stop_ids: frozenset[int]
    token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    wait_reason: WaitReason = WaitReason.QUEUED
    seat: int = 0
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_in_flight: int = 0
    considered: bool = False

    @property
    def adapter(self) -> AdapterUid | None:
        return self.request.adapter

    @property
    def owner(self) -> PageOwner:
        return PageOwner(OwnerKind.KV, f"{self.request.id}#{self.index}")

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens committed."""
        return len(self.token_ids) - self.prompt_tokens

    def finish_reason(self) -> FinishReason | None:
        """Whether the output token committed last ends the sequence, and why."""
        if self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_outputs == self.request.params.max_tokens else None

    @property
    def is_seated(self) -> bool:
        return self.state in (SequenceState.PREFILL, SequenceState.DECODE, SequenceState.DRAINING)
