"""The decision of one step, whole and frozen; and what comes back from it.

A plan says what changes: a runner keeps, for every *seat*, the occupant's page table, length, last token and sampling
state, and applies plans in order. So a plan's size is that of the change, a steady decode step is nearly empty, and
ranks that apply the same plans hold the same state. Plans hold plain numbers, strings and tuples: any serialiser takes
them (msgspec does).
"""

from __future__ import annotations

from dataclasses import dataclass

from interleaf.core.adapter import AdapterUid
from interleaf.core.events import TokenLogprobs
from interleaf.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy an adapter's image into these pages; the pages are in the image's order."""

    uid: AdapterUid
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageSwap:
    """A page of the pool, and the page-sized slot of host memory that it is copied to or from, whole."""

    page: int
    slot: int


@dataclass(frozen=True, slots=True)
class SeatStart:
    """A sequence takes a seat.

    Attributes:
        token_ids: the prompt, followed by outputs already known when the sequence was preempted earlier.
        prompt_tokens: how many of `token_ids` are the prompt.
        seed: of the sequence; output i is drawn from (seed, i), so a preempted sequence draws the same again.
        pages: KV pages for `token_ids`.
        stop_ids: token ids that end the sequence; not chosen before `params.min_tokens` outputs.
        num_cached: tokens whose KV lies in the first pages already, or is copied there by `StepPlan.swap_in`: the first
            chunk begins there. Whole pages may be shared with other sequences, which only read them too; the others
            were the sequence's own when it was preempted.
    """

    seat: int
    adapter: AdapterUid | None
    token_ids: tuple[int, ...]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    pages: tuple[int, ...]
    stop_ids: tuple[int, ...]
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class SeatGrow:
    """These pages continue the page table of a seat."""

    seat: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [first, first + count) of a seat's `token_ids`.

    Attributes:
        samples: the chunk ends the known tokens, so a token is sampled from its last row.
    """

    seat: int
    first: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, applied in the order of the fields.

    Attributes:
        step: number of the plan, counted from 0 without gaps.
        vacate: seats whose occupants have ended or were preempted.
        swap_out: pages to copy to host memory. They may be somebody else's from now on.
        evict: adapters whose pages now belong to somebody else.
        load: adapters to copy into the pool; usable once the runner has reported the copy as done.
        swap_in: pages to copy from host memory, for sequences that start. The slots may be written by the next plan.
        start, grow: changes of seats.
        chunks: prompt rows: sequences under way in order of arrival, then those that start.
        decode: seats that compute one row: the token sampled last, at the next position. In seat order.
    """

    step: int
    vacate: tuple[int, ...] = ()
    swap_out: tuple[PageSwap, ...] = ()
    evict: tuple[AdapterUid, ...] = ()
    load: tuple[AdapterLoad, ...] = ()
    swap_in: tuple[PageSwap, ...] = ()
    start: tuple[SeatStart, ...] = ()
    grow: tuple[SeatGrow, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return len(self.decode) + sum(c.count for c in self.chunks)

    @property
    def sampled_seats(self) -> tuple[int, ...]:
        """The seats that a StepResult holds a token for, in its order: decode rows, then chunks that sample."""
        return self.decode + tuple(c.seat for c in self.chunks if c.samples)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, aligned with `StepPlan.sampled_seats`.

    Attributes:
        logprobs: None if no sampled sequence asked for any; else one entry per token, None for those that did not.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
