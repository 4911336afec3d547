"""What is foreseen of the running sequences' pages, against a step-by-step count of them."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable

import pytest

from interleaf.core import AdapterUid, Request, RequestFinished, SamplingParams
from interleaf.memory.geometry import PageGeometry
from interleaf.scheduler.admission import Admission, Conservative, Estimated, Optimistic, OutputLengths
from interleaf.scheduler.sequence import Sequence
from tests.support.fake_engine import FakeSystem, expected_tokens

GEOMETRY = PageGeometry(page_tokens=1, num_layers=1, num_kv_heads=1, head_dim=8, itemsize_bytes=4)


def sequence(number: int, prompt: int, max_tokens: int, outputs: int = 0, adapter: str | None = None) -> Sequence:
    uid = None if adapter is None else AdapterUid(adapter)
    params = SamplingParams(max_tokens=max_tokens)
    seq = Sequence(
        Request(id=f"r{number}", prompt_token_ids=(1,) * prompt, params=params, adapter=uid), 0, 0, number, frozenset()
    )
    seq.token_ids += [1] * outputs
    return seq


@pytest.mark.parametrize("seed", range(20))
def test_the_estimated_peak_is_the_most_that_a_count_step_by_step_finds(seed: int) -> None:
    rng = random.Random(seed)
    admission = Estimated(prior=20)  # 20 and a deviation of 10: an end after 31 output tokens
    running: list[tuple[int, int]] = []  # tokens held in step 100, and steps to go
    seqs = []
    for number in range(12):
        prompt, max_tokens = rng.randint(1, 40), rng.randint(1, 60)
        outputs = rng.randrange(min(max_tokens, 30))
        seq = sequence(number, prompt, max_tokens, outputs)
        steps_to_go = min(31, max_tokens) - outputs
        seqs.append((seq, prompt + outputs, steps_to_go))
    *seated, (candidate, *of_candidate) = seqs
    for seq, tokens, steps_to_go in seated:
        admission.started(seq, 100, GEOMETRY)
        running.append((tokens, steps_to_go))
    for seq, *_ in seated[:3]:
        admission.left(seq)
    del running[:3]
    for joins in (None, candidate):
        rows = [*running, tuple(of_candidate)] if joins else running
        counted = max(sum(tokens + x for tokens, steps in rows if x <= steps) for x in range(61))
        assert admission.fits(joins, counted, 100, GEOMETRY)
        assert not admission.fits(joins, counted - 1, 100, GEOMETRY)


def test_a_sequence_that_outlives_its_estimate_is_expected_to_go_on() -> None:
    admission = Estimated(prior=4)
    seq = sequence(0, prompt=10, max_tokens=100)
    admission.started(seq, 0, GEOMETRY)
    assert admission.fits(None, 10 + 7, 0, GEOMETRY)
    assert not admission.fits(None, 10 + 6, 0, GEOMETRY)
    seq.token_ids += [1] * 50
    assert admission.fits(None, 10 + 53, 50, GEOMETRY)
    assert not admission.fits(None, 10 + 52, 50, GEOMETRY)
    admission.left(seq)
    assert admission.fits(None, 0, 51, GEOMETRY)
    assert not admission.fits(None, -1, 51, GEOMETRY)


@pytest.mark.parametrize("seed", range(10))
def test_what_fits_does_not_depend_on_what_was_asked_before(seed: int) -> None:
    """Of two that see the same sequences come and go, one finds the peak anew in every step, and one now and then."""
    rng = random.Random(seed)
    geometry = PageGeometry(page_tokens=4, num_layers=1, num_kv_heads=1, head_dim=8, itemsize_bytes=4)
    often, seldom = Estimated(prior=20), Estimated(prior=20)
    running: list[Sequence] = []
    for step in range(200):
        for seq in running:
            seq.token_ids.append(1)
        for seq in [seq for seq in running if len(seq.token_ids) == seq.max_tokens or rng.random() < 0.02]:
            running.remove(seq)
            for admission in (often, seldom):
                admission.left(seq)
                admission.ended(seq)
        if rng.random() < 0.4:
            seq = sequence(step, rng.randint(1, 40), rng.randint(1, 60))
            running.append(seq)
            for admission in (often, seldom):
                admission.started(seq, step, geometry)
        joining = rng.choice([None, sequence(1000, rng.randint(1, 40), rng.randint(1, 60))])
        peak = bisect_left(range(10_000), True, key=lambda pages: often.fits(joining, pages, step, geometry))
        assert seldom.fits(None, 10_000, step, geometry)  # both think again in every step, by what is known then
        if rng.random() < 0.4:
            assert seldom.fits(joining, peak, step, geometry)
            assert not seldom.fits(joining, peak - 1, step, geometry)


def test_lengths_are_learnt_per_adapter_and_a_new_adapter_is_expected_to_be_like_the_others() -> None:
    lengths = OutputLengths(prior=1000)
    long, short = AdapterUid("long"), AdapterUid("short")
    for _ in range(100):
        lengths.add(long, 400)
        lengths.add(short, 10)
    assert lengths.expected(long, 0) > 300
    assert lengths.expected(short, 0) < 120
    assert lengths.expected(short, 0) < lengths.expected(AdapterUid("new"), 0) < lengths.expected(long, 0) + 100
    assert lengths.expected(short, 600) > 600


def overloaded(admission: object) -> tuple[int, int]:
    """A pool for a third of what eight sequences will need. Returns: preemptions, and steps."""
    system = FakeSystem(
        num_pages=40, page_tokens=2, max_num_seqs=8, max_batch_tokens=32, admission=admission  # type: ignore[arg-type]
    )  # fmt: skip
    for i in range(24):
        params = SamplingParams(max_tokens=24)
        system.engine.submit(Request(id=f"r{i}", prompt_token_ids=(1, 2, 3), params=params), frozenset(), seed=i)
    finished = 0
    tokens: dict[str, list[int]] = {}
    while system.engine.has_work:
        for event in system.engine.step():
            if isinstance(event, RequestFinished):
                finished += 1
            else:
                tokens.setdefault(event.request_id, []).append(event.token_id)  # type: ignore[union-attr]
    assert finished == 24
    for i in range(24):
        assert tokens[f"r{i}"] == expected_tokens(None, i, (1, 2, 3), 24, ignore_eos=True)
    return system.scheduler.num_preemptions, len(system.runner.plans)


def test_conservative_admission_never_preempts_and_estimated_seldom_where_optimistic_often_does() -> None:
    optimistic, _ = overloaded(Optimistic())
    estimated, _ = overloaded(Estimated(prior=24))
    conservative, _ = overloaded(Conservative())
    assert conservative == 0
    assert estimated <= 2
    assert optimistic >= 10


@pytest.mark.parametrize("admission", [Optimistic, Conservative, Estimated])
def test_adapters_that_come_and_go_leave_nothing_behind(admission: Callable[[], Admission]) -> None:
    uids = [AdapterUid(f"a{i}") for i in range(30)]
    system = FakeSystem(adapters=dict.fromkeys(uids, 1), admission=admission())
    for uid in uids:
        params = SamplingParams(max_tokens=3)
        system.engine.submit(Request(id=uid, prompt_token_ids=(1,), params=params, adapter=uid), frozenset(), seed=0)
        while system.engine.has_work:
            system.engine.step()
        system.scheduler.forget_adapter(uid)
    rooms = [
        system.residency,
        system.scheduler._admission,
        system.scheduler._entrance,
        system.scheduler._entrance._times,
    ]
    if isinstance(rooms[1], Estimated):
        rooms.append(rooms[1]._lengths)
    for room in rooms:
        for name, value in vars(room).items():
            if isinstance(value, dict):
                assert not set(value) & set(uids), f"{type(room).__name__}.{name} remembers adapters that are gone"
