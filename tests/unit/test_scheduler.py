"""Plans and commits, one behaviour at a time, on a runner without tensors."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from interleaf.core import (
    AdapterUid,
    FinishReason,
    Request,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    StepPlan,
    TokenEvent,
)
from interleaf.errors import EngineDead
from interleaf.memory.allocator import OwnerKind
from interleaf.scheduler.admission import Conservative, Optimistic
from interleaf.scheduler.sequence import WaitReason
from tests.support.fake_engine import EOS, FakeRunner, FakeSystem, expected_tokens

STOP = frozenset({EOS})


def request(id_: str, prompt: tuple[int, ...], max_tokens: int = 6, adapter: str | None = None, n: int = 1) -> Request:
    uid = None if adapter is None else AdapterUid(adapter)
    return Request(id=id_, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, n=n), adapter=uid)


def run(system: FakeSystem, limit: int = 500) -> tuple[dict[tuple[str, int], list[int]], list[object]]:
    """Steps until nothing is open. Returns: tokens by sequence, and the terminal events."""
    tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
    terminal: list[object] = []
    for _ in range(limit):
        if not system.engine.has_work:
            return dict(tokens), terminal
        for event in system.engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.request_id, event.index].append(event.token_id)
            else:
                terminal.append(event)
        system.allocator.check()
    raise AssertionError(f"not done after {limit} steps: {system.scheduler.waiting_by_reason()}")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_withheld_until_the_next_plan_equal_the_model_run_alone(lookahead: int) -> None:
    """The fake runner executes step k only after plan k+1 has been made (lookahead 1): tokens must not depend on it."""
    system = FakeSystem({"x": 3, "y": 5}, lookahead=lookahead, max_num_seqs=8, num_pages=64)
    cases = {}
    for i in range(20):
        adapter = (None, "x", "y")[i % 3]
        prompt = tuple(range(1, 2 + 3 * (i % 7)))
        cases[f"r{i}"] = (adapter, i, prompt, 1 + i)
        system.engine.submit(request(f"r{i}", prompt, 1 + i, adapter), STOP, seed=i)
    tokens, terminal = run(system)
    for id_, (adapter, seed, prompt, max_tokens) in cases.items():
        assert tokens[id_, 0] == expected_tokens(adapter, seed, prompt, max_tokens), id_
    assert sorted(e.request_id for e in terminal) == sorted(cases)
    assert all(isinstance(event, RequestFinished) for event in terminal)
    assert system.allocator.num_used_pages(OwnerKind.KV) == 0


def test_the_host_is_one_step_ahead_and_an_end_by_length_costs_no_row() -> None:
    rows = {}
    for lookahead in (0, 1):
        system = FakeSystem(lookahead=lookahead)
        system.engine.submit(request("a", (1, 2, 3), max_tokens=5), frozenset(), seed=1)
        system.engine.step()
        assert len(system.runner.launched) == lookahead, "with lookahead 1 the step is still running"
        run(system)
        rows[lookahead] = system.runner.rows_computed
    assert rows[0] == rows[1] == 3 + 4


def test_an_end_by_token_costs_one_row_when_the_host_is_ahead() -> None:
    seed = next(s for s in range(100) if len(expected_tokens(None, s, (1,), 20)) == 3)
    rows = {}
    for lookahead in (0, 1):
        system = FakeSystem(lookahead=lookahead)
        system.engine.submit(request("a", (1,), max_tokens=20), STOP, seed=seed)
        tokens, _ = run(system)
        assert tokens["a", 0] == expected_tokens(None, seed, (1,), 20)
        rows[lookahead] = system.runner.rows_computed
    assert rows[1] == rows[0] + 1


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_sequences() -> None:
    system = FakeSystem(max_batch_tokens=8, num_pages=40)
    system.engine.submit(request("short", (1,), max_tokens=30), frozenset(), seed=1)
    system.engine.step()
    system.engine.submit(request("long", tuple(range(1, 28)), max_tokens=2), frozenset(), seed=2)
    tokens, _ = run(system)
    assert tokens["long", 0] == expected_tokens(None, 2, tuple(range(1, 28)), 2, ignore_eos=True)
    mixed = [plan for plan in system.runner.plans if plan.chunks and plan.decode]
    assert [plan.chunks[0].count for plan in mixed] == [7, 7, 7, 6]
    assert all(plan.num_tokens <= 8 for plan in system.runner.plans)


def test_a_sequence_whose_adapter_is_on_its_way_is_skipped_not_waited_for() -> None:
    system = FakeSystem({"cold": 2})
    system.images.on_disk.add("cold")
    system.engine.submit(request("slow", (1, 2), adapter="cold"), frozenset(), seed=1)
    system.engine.submit(request("base", (1, 2)), frozenset(), seed=2)
    finished: list[str] = []
    while "base" not in finished:
        finished += [e.request_id for e in system.engine.step() if isinstance(e, RequestFinished)]
    assert finished == ["base"]
    assert system.scheduler.waiting_by_reason() == {WaitReason.ADAPTER_FETCH: 1}
    system.images.finish_fetches()
    tokens, _ = run(system)
    assert tokens["slow", 0] == expected_tokens("cold", 1, (1, 2), 6, ignore_eos=True)


def test_a_sequence_that_waits_for_pages_is_not_overtaken() -> None:
    system = FakeSystem(num_pages=6, max_num_seqs=3)
    system.engine.submit(request("first", tuple(range(1, 17)), max_tokens=4), frozenset(), seed=1)
    system.engine.step()
    system.engine.submit(request("large", tuple(range(1, 13)), max_tokens=2), frozenset(), seed=2)
    system.engine.submit(request("small", (1,), max_tokens=1), frozenset(), seed=3)
    order = []
    while system.engine.has_work:
        order += [e.request_id for e in system.engine.step() if isinstance(e, RequestFinished)]
    assert order.index("first") < order.index("small")
    assert system.runner.plans[-1].step < 30


@pytest.mark.parametrize("lookahead", [0, 1])
def test_when_the_pool_runs_dry_the_latest_arrival_is_recomputed_and_answers_the_same(lookahead: int) -> None:
    system = FakeSystem(num_pages=10, page_tokens=2, max_num_seqs=4, max_batch_tokens=32, lookahead=lookahead)
    for i in range(4):
        system.engine.submit(request(f"r{i}", (1, 2, 3), max_tokens=12), frozenset(), seed=i)
    tokens, terminal = run(system)
    assert system.scheduler.num_preemptions > 0
    for i in range(4):
        assert tokens[f"r{i}", 0] == expected_tokens(None, i, (1, 2, 3), 12, ignore_eos=True)
    assert terminal[0] == RequestFinished("r0"), "the oldest is never preempted"


def test_a_preempted_sequence_lets_go_of_its_adapter() -> None:
    system = FakeSystem({"a": 3}, num_pages=10, page_tokens=2, max_num_seqs=2, max_batch_tokens=8)
    system.engine.submit(request("first", (1, 2), 16), frozenset(), seed=1)
    system.engine.step()
    system.engine.submit(request("second", (1, 2), 12, "a"), frozenset(), seed=2)
    run(system)
    assert system.scheduler.num_preemptions > 0
    # Ten pages hold the nine of the first sequence only because the adapter of the second one has left.
    assert [uid for plan in system.runner.plans for uid in plan.evict] == ["a"]
    assert system.residency.counts.loads == 2


def test_idle_adapters_leave_least_recently_used_first_before_anything_is_preempted() -> None:
    system = FakeSystem({"a": 3, "b": 3, "c": 3}, num_pages=10)
    for name in ("a", "b", "a", "c"):
        system.engine.submit(request(f"{name}{len(system.runner.plans)}", (1,), 1, name), frozenset(), seed=1)
        run(system)
    assert set(system.residency.resident()) == {"a", "b", "c"}
    system.engine.submit(request("kv", tuple(range(1, 17)), 2), frozenset(), seed=1)
    run(system)
    assert set(system.residency.resident()) == {"c"}
    assert system.scheduler.num_preemptions == 0
    assert [uid for plan in system.runner.plans for uid in plan.evict] == ["b", "a"]


def test_an_adapter_in_use_is_never_evicted_and_the_wanting_one_waits() -> None:
    system = FakeSystem({"a": 6, "b": 6}, num_pages=10)
    system.engine.submit(request("ra", (1,), 8, "a"), frozenset(), seed=1)
    for _ in range(3):
        system.engine.step()
    system.engine.submit(request("rb", (1,), 8, "b"), frozenset(), seed=2)
    for _ in range(2):
        system.engine.step()
    assert system.scheduler.waiting_by_reason() == {WaitReason.PAGES: 1}
    tokens, _ = run(system)
    assert len(tokens["ra", 0]) + len(tokens["rb", 0]) > 8
    assert system.residency.resident() == ("b",)


def test_a_failed_fetch_or_copy_fails_its_requests_only_and_frees_its_pages() -> None:
    system = FakeSystem({"good": 2, "gone": 2, "torn": 2})
    system.images.failed["gone"] = "its folder has vanished"
    system.runner.broken_copies.add("torn")
    for name in ("gone", "good", "torn"):
        system.engine.submit(request(name, (1, 2), adapter=name), frozenset(), seed=1)
    tokens, terminal = run(system)
    assert set(terminal) == {
        RequestFailed("gone", "its folder has vanished"),
        RequestFailed("torn", "the copy broke"),
        RequestFinished("good"),
    }
    assert set(tokens) == {("good", 0)}
    assert system.allocator.num_used_pages(OwnerKind.ADAPTER) == 2
    assert not any(system.images.pins.values())


def test_aborting_at_any_moment_ends_the_request_once_and_returns_its_pages() -> None:
    for moment in range(12):
        system = FakeSystem({"a": 2})
        system.engine.submit(request("x", tuple(range(1, 20)), 6, "a", n=2), frozenset(), seed=1)
        system.engine.submit(request("y", (1,), 6, "a"), frozenset(), seed=5)
        events = [event for _ in range(moment) for event in system.engine.step()]
        system.engine.abort("x")
        system.engine.abort("x")
        tokens, terminal = run(system)
        ends = [e for e in events + terminal if not isinstance(e, TokenEvent) and e.request_id == "x"]
        assert len(ends) == 1, moment
        assert isinstance(ends[0], RequestAborted | RequestFinished)
        assert system.allocator.num_used_pages(OwnerKind.KV) == 0
        seen = [e.token_id for e in events if isinstance(e, TokenEvent) and e.request_id == "y"]
        assert seen + tokens.get(("y", 0), []) == expected_tokens("a", 5, (1,), 6, ignore_eos=True)


def test_one_sequence_of_a_request_can_be_ended_alone() -> None:
    system = FakeSystem()
    system.engine.submit(request("x", (1,), 6, n=3), frozenset(), seed=1)
    system.engine.step()
    system.engine.abort("x", 1)
    tokens, terminal = run(system)
    assert terminal == [RequestFinished("x")]
    assert len(tokens["x", 0]) == len(tokens["x", 2]) == 6
    assert len(tokens.get(("x", 1), [])) <= 1


def test_a_sequence_says_why_it_ended() -> None:
    seed = next(s for s in range(100) if len(expected_tokens(None, s, (1,), 20)) < 8)
    system = FakeSystem()
    system.engine.submit(request("stops", (1,), 20), STOP, seed=seed)
    system.engine.submit(request("long", (1,), 3), frozenset(), seed=seed)
    last: dict[str, TokenEvent] = {}
    while system.engine.has_work:
        last |= {e.request_id: e for e in system.engine.step() if isinstance(e, TokenEvent)}
    assert (last["stops"].finish_reason, last["stops"].stop_token) == (FinishReason.STOP, EOS)
    assert (last["long"].finish_reason, last["long"].stop_token) == (FinishReason.LENGTH, None)


def test_when_a_step_fails_every_request_ends_and_new_ones_are_refused() -> None:
    system = FakeSystem()
    system.runner.fail_at_step = 2
    for i in range(3):
        system.engine.submit(request(f"r{i}", (1, 2), 10), frozenset(), seed=i)
    _, terminal = run(system)
    assert sorted(e.request_id for e in terminal) == ["r0", "r1", "r2"]
    assert all(isinstance(e, RequestFailed) and "on fire" in e.reason for e in terminal)
    with pytest.raises(EngineDead, match="on fire"):
        system.engine.submit(request("late", (1,)), frozenset(), seed=1)


def starts_by_step(system: FakeSystem) -> dict[int, int]:
    """How many sequences each step started, those with none left out."""
    return {plan.step: len(plan.start) for plan in system.runner.plans if plan.start}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_under_load_prompts_are_computed_in_groups_of_refill_seats(lookahead: int) -> None:
    mixed = {}
    for refill in (1, 3):
        system = FakeSystem(num_pages=64, max_num_seqs=6, max_batch_tokens=64, lookahead=lookahead, refill_seats=refill)
        for i in range(30):
            system.engine.submit(request(f"r{i}", (1, 2), 5 + i % 7), frozenset(), seed=i)
        tokens, _ = run(system)
        for i in range(30):
            assert tokens[f"r{i}", 0] == expected_tokens(None, i, (1, 2), 5 + i % 7, ignore_eos=True)
        mixed[refill] = len([plan for plan in system.runner.plans if plan.start])
        first, *groups, _ = starts_by_step(system).values()  # the last group may have run out of requests
        assert first == 6, "an idle system starts whom it can"
        assert all(count >= refill for count in groups)
    assert mixed[3] * 2 <= mixed[1]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_where_pages_are_short_prompts_are_computed_in_groups_too(lookahead: int) -> None:
    mixed = {}
    for refill in (1, 4):
        # Seats for 16, pages for about 8: half the seats, so a group is half of refill_seats.
        system = FakeSystem(
            num_pages=48, max_num_seqs=16, max_batch_tokens=64, lookahead=lookahead, refill_seats=refill,
            admission=Conservative(),
        )  # fmt: skip
        for i in range(40):
            system.engine.submit(request(f"r{i}", (1, 2), 16 + i % 5), frozenset(), seed=i)
        tokens, _ = run(system)
        for i in range(40):
            assert tokens[f"r{i}", 0] == expected_tokens(None, i, (1, 2), 16 + i % 5, ignore_eos=True)
        mixed[refill] = len([plan for plan in system.runner.plans if plan.start])
    assert mixed[4] < mixed[1]


def test_a_preempted_sequence_comes_before_those_that_never_started() -> None:
    """It may have started long before its turn, while those ahead waited for their adapters."""
    system = FakeSystem({"a": 2}, num_pages=12, max_num_seqs=4, max_batch_tokens=64, admission=Optimistic())
    system.images.on_disk.add("a")
    for i in range(6):  # ahead, and not to be started before their adapter is in the pool
        system.engine.submit(request(f"ahead{i}", (1, 2), 8, "a"), frozenset(), seed=i)
    for i in range(3):
        system.engine.submit(request(f"early{i}", (1, 2), 26), frozenset(), seed=10 + i)
    for _ in range(4):
        system.engine.step()
    assert len(system.scheduler.waiting_by_reason()) >= 1
    system.images.on_disk.clear()
    tokens, _ = run(system)
    assert system.scheduler.num_preemptions > 0
    starts = [start.seed for plan in system.runner.plans for start in plan.start]
    again = [at for at, seed in enumerate(starts) if seed >= 10 and seed in starts[:at]]
    assert again, "an early one was preempted and has started again"
    assert len(starts) - 1 not in again, "somebody who had never started came after it"
    for i in range(3):
        rest = tokens[f"early{i}", 0]  # but for those of the first four steps
        assert rest == expected_tokens(None, 10 + i, (1, 2), 26, ignore_eos=True)[-len(rest) :]


def test_at_low_load_a_prompt_is_computed_at_once() -> None:
    system = FakeSystem(num_pages=64, max_num_seqs=6, refill_seats=3)
    for i in range(4):
        system.engine.submit(request(f"r{i}", (1,), 20), frozenset(), seed=i)
        system.engine.step()
    assert starts_by_step(system) == {0: 1, 1: 1, 2: 1, 3: 1}
    system.engine.submit(request("fifth", (1,), 20), frozenset(), seed=4)
    system.engine.step()
    assert system.scheduler.waiting_by_reason() == {WaitReason.SEATS: 1}, "two seats are free, groups are of three"
    run(system)


def test_nobody_is_held_back_while_nothing_decodes() -> None:
    system = FakeSystem(num_pages=64, max_num_seqs=4, max_batch_tokens=4, refill_seats=4)
    for i in range(3):
        system.engine.submit(request(f"r{i}", tuple(range(1, 12)), 4), frozenset(), seed=i)
        system.engine.step()
    tokens, _ = run(system)
    assert len(tokens) == 3


def test_a_group_larger_than_the_token_budget_is_started_whole() -> None:
    system = FakeSystem(num_pages=64, max_num_seqs=4, max_batch_tokens=8, refill_seats=4)
    for i in range(8):
        system.engine.submit(request(f"r{i}", tuple(range(1, 6)), 6), frozenset(), seed=i)
    run(system)
    steps = list(starts_by_step(system))
    assert sum(starts_by_step(system).values()) == 8
    second = [step for step in steps if step > max(steps) - 4]
    assert sum(len(system.runner.plans[step].start) for step in second) == 4, (
        "the four seats are filled one after another"
    )


def test_adapters_of_those_held_back_are_sent_for_meanwhile() -> None:
    system = FakeSystem({"a": 2}, num_pages=64, max_num_seqs=4, refill_seats=3)
    for i in range(3):
        system.engine.submit(request(f"r{i}", (1,), 12), frozenset(), seed=i)
    system.engine.step()
    system.engine.submit(request("held", (1,), 2, "a"), frozenset(), seed=9)
    for _ in range(4):
        system.engine.step()
    assert system.residency.resident() == ("a",)
    assert system.scheduler.waiting_by_reason() == {WaitReason.SEATS: 1}
    run(system)


def test_a_steady_decode_step_is_a_nearly_empty_plan() -> None:
    system = FakeSystem(page_tokens=16, num_pages=64)
    for i in range(4):
        system.engine.submit(request(f"r{i}", (1, 2), 14), frozenset(), seed=i)
    run(system)
    steady = [p for p in system.runner.plans if len(p.decode) == 4]
    assert len(steady) >= 10
    assert all(not (p.vacate or p.start or p.grow or p.chunks or p.load or p.evict) for p in steady)
    assert all(p.decode is steady[0].decode for p in steady), "the row list is not rebuilt while nobody comes or goes"


def test_plans_survive_serialisation_and_ranks_that_get_them_do_the_same() -> None:
    system = FakeSystem({"x": 3, "y": 4}, num_pages=14, max_num_seqs=3)
    for i in range(8):
        system.engine.submit(request(f"r{i}", tuple(range(1, 2 + i)), 6, (None, "x", "y")[i % 3]), STOP, seed=i)
    run(system)
    other_rank = FakeRunner(system.num_pages, system.page_tokens)
    for plan in system.runner.plans:
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        assert copy == plan
        assert other_rank.launch(copy).result().token_ids == system.runner.results[plan.step].token_ids
