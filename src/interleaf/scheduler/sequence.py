"""One sequence on its way through the scheduler, which alone changes it."""

from __future__ import annotations

from enum import Enum

from interleaf.core import AdapterFound, FinishReason, Request, SequenceStart
from interleaf.memory.allocator import OwnerKind, PageOwner
from interleaf.memory.kept import KeptPages
from interleaf.memory.prefix import PrefixPage, Root


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
    LOAD_LIMIT = "as many adapters as allowed are on their way"
    PREFIX = "its prefix is being computed"
    LAST_TOKEN = "its last token is in flight"


class Sequence:
    """A request's prompt and one of its continuations.

    Attributes:
        order: its place in the order of arrival.
        token_ids: the prompt and every output token that has been committed.
        max_tokens: tokens of prompt and output at most.
        pages: its KV pages, in order of position.
        prefix: the first of them that belong to the prefix cache.
        kept: its pages while it waits, if it has been preempted.
        num_known: tokens known when it took its seat: so many are prefilled.
        num_prefilled: positions whose KV is in the cache or planned, until it decodes.
        first_decode_step: the step of its first decode row, once the known tokens are planned.
        grow_step, last_step: the step that needs another page, and the one that samples its last token by length.
        resume_step: a step of that number or a later one must be planned before it may start again, with all earlier
            ones committed: a token of it is in flight.
        considered: whether the state of its adapter has been counted as a hit or a miss.
        found: as which.
        load_s: see SequenceStart.
        start: how it came to its first seat; None before that.
        waits: seconds that it has waited by reason, those told in `start` excepted.
    """

    __slots__ = (
        "adapter", "considered", "first_decode_step", "found", "grow_step", "index", "kept", "last_step", "load_s",
        "max_tokens", "num_known", "num_prefilled", "order", "owner", "pages", "prefix", "prompt_tokens", "request",
        "request_id", "resume_step", "root", "seat", "seed", "start", "state", "stop_ids", "token_ids",
        "waits",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, seed: int, order: int, stop_ids: frozenset[int]) -> None:
        self.request = request
        self.request_id = request.id
        self.adapter = request.adapter
        self.index = index
        self.seed = seed
        self.order = order
        self.stop_ids = stop_ids
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_tokens = len(self.token_ids)
        self.max_tokens = self.prompt_tokens + request.params.max_tokens
        self.owner = PageOwner(OwnerKind.KV, f"{request.id}#{index}")
        self.root: Root = (request.adapter, request.cache_salt)
        self.state = SequenceState.WAITING
        self.seat = 0
        self.pages: list[int] = []
        self.prefix: list[PrefixPage] = []
        self.kept: KeptPages | None = None
        self.num_known = 0
        self.num_prefilled = 0
        self.first_decode_step = 0
        self.grow_step = 0
        self.last_step = 0
        self.resume_step = 0
        self.considered = False
        self.found: AdapterFound | None = None
        self.load_s: float | None = None
        self.start: SequenceStart | None = None
        self.waits: dict[str, float] = {}

    @property
    def num_outputs(self) -> int:
        """Output tokens committed."""
        return len(self.token_ids) - self.prompt_tokens

    def num_computed(self, step: int) -> int:
        """Positions whose KV the steps planned before number `step` have written, the last token's excepted."""
        if self.state is SequenceState.PREFILL:
            return self.num_prefilled
        return min(self.num_known + step - self.first_decode_step, self.max_tokens - 1)

    def finish_reason(self) -> FinishReason | None:
        """Whether the output token committed last ends the sequence, and why."""
        if self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == self.max_tokens else None

    @property
    def is_waiting(self) -> bool:
        return self.state is SequenceState.WAITING

    @property
    def is_seated(self) -> bool:
        return self.state in (SequenceState.PREFILL, SequenceState.DECODE, SequenceState.DRAINING)
