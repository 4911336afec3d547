"""How long anybody can wait: the bound that docs/scheduling.md states, under lasting overload with every kind of fault.

A step takes a second of the fake clock.
"""

from __future__ import annotations

import random

import pytest

from interleaf.core import AdapterUid, Request, RequestFailed, SamplingParams
from interleaf.memory.eviction import CostAware
from interleaf.scheduler.admission import Admission, Estimated, Optimistic
from interleaf.scheduler.loads import LoadLimits
from tests.support.fake_engine import FakeSystem

SEATS, BUDGET, TIMEOUT_S, LOOKAHEAD = 3, 7, 6, 1
LONGEST_PROMPT, LONGEST_OUTPUT = 12, 6
MOST_WAITING = 30
FIRST_IN_LINE_STEPS = (
    2 * TIMEOUT_S  # a fetch and a copy, each within the limit; meanwhile others may take seats
    + -(-SEATS * LONGEST_PROMPT // (BUDGET - SEATS + 1))  # their prompts, in what the decoding rows leave of a step
    + LONGEST_OUTPUT  # they decode side by side
    + 2 * LOOKAHEAD  # and their last tokens are read
)


def system_of(seed: int) -> FakeSystem:
    rng = random.Random(seed)
    admission: Admission = (Optimistic(), Estimated(prior=8))[seed % 2]
    return FakeSystem(
        {f"a{i}": rng.randint(1, 3) for i in range(40)},
        num_pages=12,  # the longest with the largest adapter takes 11
        page_tokens=2,
        max_batch_tokens=BUDGET,
        max_num_seqs=SEATS,
        lookahead=LOOKAHEAD,
        refill_seats=1 + seed % 2,
        loads=LoadLimits(max_loads=2, prefetch_loads=seed % 3, timeout_s=TIMEOUT_S),
        admission=admission,
        eviction=CostAware(),
        prefix_cache=seed % 4 > 1,
    )


def request(number: int, rng: random.Random, now_s: float) -> Request:
    """One in ten is as long as any may be, and needs nearly all of the pool; those behind it are short."""
    is_long = rng.random() < 0.1
    prompt = LONGEST_PROMPT if is_long else rng.randint(1, 3)
    return Request(
        id=f"r{number}",
        prompt_token_ids=tuple(rng.randint(1, 3) for _ in range(prompt)),
        params=SamplingParams(max_tokens=4 if is_long else rng.randint(1, LONGEST_OUTPUT), ignore_eos=True),
        adapter=AdapterUid(f"a{rng.randrange(40)}") if rng.random() < 0.8 else None,
        arrival_s=now_s,
    )


@pytest.mark.parametrize("seed", range(8))
def test_whoever_is_first_in_line_is_served_within_the_bound_however_many_come_behind(seed: int) -> None:
    rng = random.Random(100 + seed)
    system = system_of(seed)
    number = 0
    first, since, longest, preempted = None, 0, 0, 0
    ends: list[object] = []
    for step in range(1500):
        while system.scheduler.num_waiting < MOST_WAITING:
            system.engine.submit(request(number, rng, system.now_s), frozenset(), seed=number)
            number += 1
        # Half of the adapters are not in host memory at any time; a tenth of the fetches and copies hang for long.
        system.images.on_disk.update(f"a{rng.randrange(40)}" for _ in range(4))
        system.runner.slow_copies = {f"a{i}" for i in range(0, 40, 3)}
        if rng.random() < 0.3:
            system.images.finish_fetches()
        if rng.random() < 0.3:
            system.runner.finish_copies()
        system.now_s += 1.0
        events = system.engine.step()
        ends += [event for event in events if isinstance(event, RequestFailed)]
        head = next(iter(system.scheduler._entrance._waiting), None)
        if head is not first:
            first, since = head, step
        longest = max(longest, step - since)
        assert step - since <= FIRST_IN_LINE_STEPS, (
            f"{first and first.owner} waits: {system.scheduler.waiting_by_reason()}"
        )
        preempted = system.scheduler.num_preemptions
    assert number > 150, "hardly anybody was served: this tests nothing"
    assert longest > TIMEOUT_S, "nobody had to wait: this tests nothing"
    assert ends or preempted, "nothing went wrong: this tests nothing"
