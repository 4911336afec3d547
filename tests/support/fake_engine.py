"""A host tier and a runner without tensors, and the scheduler around them.

The fake runner keeps a memory of its own: every KV slot remembers which sequence wrote which token into it, with which
adapter and after which tokens; every adapter page which part of which adapter. A token is a function of what is *read
back* through the page tables, so a page handed out too early, a stale table or a lost token gives other tokens than
`expected_tokens`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from interleaf.adapters.residency import Residency
from interleaf.core import (
    AdapterUid,
    HostState,
    PooledLayout,
    SeatStart,
    StepPlan,
    StepResult,
)
from interleaf.engine.engine import Engine
from interleaf.memory.eviction import EvictionPolicy, Lru
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.prefix import PrefixCache
from interleaf.memory.regions import Regions
from interleaf.memory.swap import SwapSpace
from interleaf.scheduler.admission import Admission, Optimistic
from interleaf.scheduler.loads import LoadLimits
from interleaf.scheduler.policy import Fcfs
from interleaf.scheduler.preemption import LatestArrival
from interleaf.scheduler.scheduler import Scheduler

VOCAB = 29
EOS = 0


def next_token(adapter: str | None, seed: int, tokens: tuple[int, ...]) -> int:
    """The fake model: any change of adapter, seed or context changes the token."""
    digest = hashlib.blake2b(repr((adapter, seed, tokens)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_tokens(
    adapter: str | None, seed: int, prompt: tuple[int, ...], max_tokens: int, *, ignore_eos: bool = False
) -> list[int]:
    """What a sequence must answer, computed without any engine."""
    outputs: list[int] = []
    while len(outputs) < max_tokens and (ignore_eos or EOS not in outputs):
        outputs.append(next_token(adapter, seed, prompt + tuple(outputs)))
    return outputs


class FakeImages:
    """A host tier in which tests decide what is in memory, on its way, or broken."""

    def __init__(self, pages: dict[str, int]) -> None:
        self.pages = pages
        self.on_disk: set[str] = set()
        self.fetching: set[str] = set()
        self.failed: dict[str, str] = {}
        self.pins: dict[str, int] = {}
        self.num_asked = 0

    def layout(self, uid: AdapterUid) -> PooledLayout:
        return PooledLayout(layouts=(), layer_layout=(), pages=self.pages[uid], used_bytes=0)

    def prepare(self, uid: AdapterUid) -> HostState:
        self.num_asked += 1
        if uid in self.failed:
            return HostState.FAILED
        if uid in self.on_disk:
            self.fetching.add(uid)
            return HostState.FETCHING
        return HostState.READY

    def failure(self, uid: AdapterUid) -> str:
        return self.failed[uid]

    def pin(self, uid: AdapterUid) -> None:
        assert uid not in self.on_disk
        self.pins[uid] = self.pins.get(uid, 0) + 1

    def unpin(self, uid: AdapterUid) -> None:
        self.pins[uid] -= 1

    def finish_fetches(self) -> None:
        self.on_disk -= self.fetching
        self.fetching.clear()


@dataclass
class _Seat:
    start: SeatStart
    pages: list[int]
    tokens: list[int]
    num_written: int


@dataclass
class _Load:
    uid: AdapterUid
    error: str | None = None


@dataclass
class _Handle:
    runner: FakeRunner
    plan: StepPlan
    handed_over: frozenset[AdapterUid] = frozenset()
    outcome: StepResult | None = None

    def result(self) -> StepResult:
        """Executes everything launched up to this step, as late as it can be."""
        while self.outcome is None:
            self.runner.run_next()
        return self.outcome


class FakeRunner:
    """Executes plans in order, each one only when somebody waits for it (or for a later one).

    Attributes:
        early_copies: adapters that are handed over as soon as their copy has been launched: every later step waits for
            it. No such copy is broken or slow.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.memory: list[dict[object, object]] = [{} for _ in range(num_pages)]
        self.host: dict[int, dict[object, object]] = {}
        self.seats: dict[int, _Seat] = {}
        self.adapters: dict[AdapterUid, tuple[int, ...]] = {}
        self.launched: deque[_Handle] = deque()
        self.reports: list[_Load] = []
        self.broken_copies: set[str] = set()
        self.slow_copies: set[str] = set()
        self.early_copies: frozenset[str] = frozenset()
        self.copying: dict[AdapterUid, tuple[int, ...]] = {}
        self.spare = 0.0
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.rows_computed = 0
        self.fail_at_step: int | None = None

    def launch(self, plan: StepPlan) -> _Handle:
        assert plan.step == len(self.plans)
        self.plans.append(plan)
        early = [load.uid for load in plan.load if load.uid in self.early_copies - self.broken_copies]
        self.reports += map(_Load, early)
        handle = _Handle(self, plan, frozenset(early))
        self.launched.append(handle)
        return handle

    def poll_loads(self) -> list[_Load]:
        reports, self.reports = self.reports, []
        return reports

    def spare_s(self) -> float:
        return self.spare

    def wait_for_load(self) -> bool:
        return False  # a copy ends with the step that began it

    def close(self) -> None:
        while self.launched:
            self.run_next()

    def run_next(self) -> None:
        handle = self.launched.popleft()
        handle.outcome = self._execute(handle.plan, handle.handed_over)
        self.results.append(handle.outcome)

    def _execute(self, plan: StepPlan, handed_over: frozenset[AdapterUid]) -> StepResult:
        if plan.step == self.fail_at_step:
            raise MemoryError("the device is on fire")
        for seat in plan.vacate:
            del self.seats[seat]
        for swap in plan.swap_out:
            self.host[swap.slot] = dict(self.memory[swap.page])
        for uid in plan.evict:
            self.adapters.pop(uid, None)
        for load in plan.load:
            if load.uid in handed_over:
                self._fill(load.uid, load.pages)
            elif load.uid in self.broken_copies:
                self.reports.append(_Load(load.uid, "the copy broke"))
            elif load.uid in self.slow_copies:
                self.copying[load.uid] = load.pages
            else:
                self._end_copy(load.uid, load.pages)
        for swap in plan.swap_in:
            self.memory[swap.page] = self.host.pop(swap.slot)
        for start in plan.start:
            assert start.seat not in self.seats, "the seat is taken"
            assert start.num_cached < len(start.token_ids), "nothing is left to sample from"
            self.seats[start.seat] = _Seat(start, list(start.pages), list(start.token_ids), start.num_cached)
        for grow in plan.grow:
            self.seats[grow.seat].pages.extend(grow.pages)
        sampled = {}
        for seat in plan.decode:
            state = self.seats[seat]
            self._write(state, len(state.tokens) - 1)
            sampled[seat] = self._sample(state)
        for chunk in plan.chunks:
            state = self.seats[chunk.seat]
            assert chunk.first == state.num_written, "a chunk does not continue the last one"
            for position in range(chunk.first, chunk.first + chunk.count):
                self._write(state, position)
            if chunk.samples:
                assert chunk.first + chunk.count == len(state.tokens)
                sampled[chunk.seat] = self._sample(state)
        return StepResult(tuple(sampled[seat] for seat in plan.sampled_seats))

    def finish_copies(self) -> None:
        """The slow copies that were begun have ended."""
        for uid, pages in self.copying.items():
            self._end_copy(uid, pages)
        self.copying.clear()

    def _end_copy(self, uid: AdapterUid, pages: tuple[int, ...]) -> None:
        self._fill(uid, pages)
        self.reports.append(_Load(uid))

    def _fill(self, uid: AdapterUid, pages: tuple[int, ...]) -> None:
        for part, page in enumerate(pages):
            self.memory[page] = {"adapter": (uid, part)}
        self.adapters[uid] = pages

    def _write(self, state: _Seat, position: int) -> None:
        page = self.memory[state.pages[position // self.page_tokens]]
        page.pop("adapter", None)
        page[position % self.page_tokens] = (state.start.seed, *self._content(state, position))
        state.num_written = position + 1
        self.rows_computed += 1

    @staticmethod
    def _content(state: _Seat, position: int) -> tuple[object, ...]:
        """What KV depends on: the adapter, the token and all tokens before it."""
        return state.start.adapter, position, state.tokens[position], hash(tuple(state.tokens[:position]))

    def _sample(self, state: _Seat) -> int:
        context = []
        for position in range(len(state.tokens)):
            seed, *content = self.memory[state.pages[position // self.page_tokens]][position % self.page_tokens]
            assert tuple(content) == self._content(state, position), "the slot holds KV of something else"
            assert seed == state.start.seed or position < state.start.num_cached, "the slot is somebody else's"
            token = content[2]
            context.append(token)
        uid = state.start.adapter
        if uid is not None:
            for part, page in enumerate(self.adapters[uid]):
                assert self.memory[page] == {"adapter": (uid, part)}, "the adapter's page was overwritten"
        token = next_token(uid, state.start.seed, tuple(context))
        state.tokens.append(token)
        return token


@dataclass
class FakeSystem:
    """Allocator, residency, scheduler and engine over the fakes."""

    adapters: dict[str, int] = field(default_factory=dict)
    num_pages: int = 32
    page_tokens: int = 4
    max_batch_tokens: int = 16
    max_num_seqs: int = 4
    lookahead: int = 1
    refill_seats: int = 1
    loads: LoadLimits = field(default_factory=LoadLimits)
    admission: Admission = field(default_factory=Optimistic)
    eviction: EvictionPolicy = field(default_factory=Lru)
    prefix_cache: bool = False
    swap_slots: int = 0
    memory_split: float | None = None
    early_copies: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        regions = Regions.of(self.num_pages, self.memory_split)
        self.allocator = regions if regions.are_split else regions.sequences
        self.residency = Residency(regions.adapters, self.eviction)
        region = regions.for_sequences(self.eviction)
        self.prefixes = PrefixCache(regions.sequences, (region or self.residency).reclaimer, self.page_tokens)
        self.swap = SwapSpace(self.swap_slots, self.page_tokens, lambda: self.eviction.costs)
        self.images = FakeImages(self.adapters)
        self.runner = FakeRunner(self.num_pages, self.page_tokens)
        self.runner.early_copies = self.early_copies
        self.scheduler = Scheduler(
            geometry=PageGeometry(self.page_tokens, num_layers=1, num_kv_heads=1, head_dim=8, itemsize_bytes=4),
            allocator=regions.sequences,
            residency=self.residency,
            images=self.images,
            policy=Fcfs(),
            admission=self.admission,
            preemption=LatestArrival(),
            max_batch_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_num_seqs,
            refill_seats=self.refill_seats,
            loads=self.loads,
            prefixes=self.prefixes if self.prefix_cache else None,
            swap=self.swap,
            region=region,
        )
        self.now_s = 0.0
        self.engine = Engine(self.scheduler, self.runner, lookahead=self.lookahead, now=lambda: self.now_s)
