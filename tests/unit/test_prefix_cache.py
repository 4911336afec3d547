"""What sequences that begin alike share, when, and what they never share; on a runner without tensors.

The fake runner remembers the adapter and the tokens that every slot of KV was computed with, so a page shared wrongly
fails there.
"""

from __future__ import annotations

import pytest

from interleaf.core import AdapterUid, Request, RequestFinished, SamplingParams, TokenEvent
from interleaf.memory.allocator import OwnerKind, PageAllocator, PageOwner
from interleaf.memory.eviction import Lru, Reclaimer
from interleaf.memory.prefix import PrefixCache
from interleaf.scheduler.sequence import WaitReason
from tests.support.fake_engine import FakeSystem, expected_tokens

SYSTEM = tuple(range(1, 13))
"""Three pages of four tokens."""


def request(
    id_: str,
    prompt: tuple[int, ...],
    max_tokens: int = 3,
    adapter: str | None = None,
    salt: str | None = None,
    n: int = 1,
) -> Request:
    uid = None if adapter is None else AdapterUid(adapter)
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(id=id_, prompt_token_ids=prompt, params=params, adapter=uid, cache_salt=salt)


def make(**settings: object) -> FakeSystem:
    defaults: dict[str, object] = {"num_pages": 400, "max_num_seqs": 64, "max_batch_tokens": 256, "prefix_cache": True}
    return FakeSystem(**(defaults | settings))  # type: ignore[arg-type]


def run(system: FakeSystem) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(500):
        if not system.engine.has_work:
            break
        for event in system.engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.token_id)
            else:
                assert isinstance(event, RequestFinished)
        system.allocator.check()
        system.prefixes.check()
    assert not system.engine.has_work
    return tokens


def prefilled(system: FakeSystem) -> int:
    return sum(chunk.count for plan in system.runner.plans for chunk in plan.chunks)


def submit_fifty(system: FakeSystem, **kwargs: object) -> None:
    for i in range(50):
        system.engine.submit(request(f"r{i}", (*SYSTEM, 20 + i % 5, i), **kwargs), frozenset(), seed=i)  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_shared_by_fifty_that_arrive_together_is_computed_once(adapter: str | None, lookahead: int) -> None:
    system = make(adapters={"a": 3}, lookahead=lookahead)
    submit_fifty(system, adapter=adapter)
    tokens = run(system)
    assert prefilled(system) == len(SYSTEM) + 50 * 2
    for i in range(50):
        right = expected_tokens(adapter, i, (*SYSTEM, 20 + i % 5, i), 3, ignore_eos=True)
        assert tokens[f"r{i}"] == right


def test_a_prompt_shared_with_one_that_has_finished_is_computed_once() -> None:
    system = make()
    system.engine.submit(request("first", (*SYSTEM, 19)), frozenset(), seed=99)
    run(system)
    submit_fifty(system)
    run(system)
    assert prefilled(system) == len(SYSTEM) + 1 + 50 * 2
    assert system.allocator.num_used_pages(OwnerKind.KV) == 0


def test_those_that_wait_for_a_prefix_say_so_and_do_not_hold_up_others() -> None:
    system = make()
    submit_fifty(system)
    system.engine.submit(request("other", (50, 51)), frozenset(), seed=1)
    system.engine.step()
    assert system.scheduler.waiting_by_reason() == {WaitReason.PREFIX: 49}
    assert [start.seed for start in system.runner.plans[0].start] == [0, 1]
    run(system)


def test_without_the_cache_everything_is_computed_and_every_answer_is_the_same() -> None:
    answers = []
    for prefix_cache in (False, True):
        system = make(prefix_cache=prefix_cache)
        submit_fifty(system)
        answers.append(run(system))
        if not prefix_cache:
            assert prefilled(system) == 50 * (len(SYSTEM) + 2)
    assert answers[0] == answers[1]


def test_a_prompt_computed_in_chunks_is_waited_for_to_the_end_of_what_is_shared() -> None:
    system = make(max_batch_tokens=5, max_num_seqs=4)
    for i in range(3):
        system.engine.submit(request(f"r{i}", (*SYSTEM, i)), frozenset(), seed=i)
    run(system)
    assert prefilled(system) == len(SYSTEM) + 3


def test_nobody_waits_for_a_prefix_shorter_than_a_page() -> None:
    system = make()
    for i in range(4):
        system.engine.submit(request(f"r{i}", (1, 2, 3, 5 + i)), frozenset(), seed=i)
    system.engine.step()
    assert [plan.step for plan in system.runner.plans if plan.start] == [0]
    assert len(system.runner.plans[0].start) == 4
    run(system)


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    system = make()
    for i in range(2):
        system.engine.submit(request(f"r{i}", SYSTEM), frozenset(), seed=i)
        run(system)
    assert [chunk.count for plan in system.runner.plans for chunk in plan.chunks] == [12, 4]


def test_the_continuations_of_one_request_share_its_prompt() -> None:
    system = make()
    system.engine.submit(request("r", (*SYSTEM, 7), n=8), frozenset(), seed=3)
    run(system)
    assert prefilled(system) == len(SYSTEM) + 8


def test_a_conversation_goes_on_from_the_answer_before() -> None:
    system = make()
    system.engine.submit(request("turn1", SYSTEM, max_tokens=9), frozenset(), seed=5)
    answer = run(system)["turn1"]
    before = prefilled(system)
    history = (*SYSTEM, *answer, 3, 3)
    system.engine.submit(request("turn2", history), frozenset(), seed=6)
    run(system)
    # The last token of an answer is never fed back, so its KV was not computed: 20 of 21 tokens, five whole pages.
    assert prefilled(system) - before == len(history) - 20


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"adapter": None}, {"adapter": "a"}),
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": None}, {"salt": "x"}),
        ({"adapter": "a", "salt": "x"}, {"adapter": "a", "salt": None}),
    ],
)
def test_nothing_is_shared_across_adapters_or_salts(one: dict[str, str | None], other: dict[str, str | None]) -> None:
    system = make(adapters={"a": 1, "b": 1})
    for number, kwargs in enumerate((one, other, one)):
        system.engine.submit(request(f"r{number}", (*SYSTEM, 1), **kwargs), frozenset(), seed=number)  # type: ignore[arg-type]
        run(system)
    assert [start.num_cached for plan in system.runner.plans for start in plan.start] == [0, 0, len(SYSTEM)]


def test_an_adapter_that_is_withdrawn_takes_its_prefixes_along_and_one_that_is_evicted_does_not() -> None:
    system = make(adapters={"a": 2})
    system.engine.submit(request("r0", (*SYSTEM, 1), adapter="a"), frozenset(), seed=1)
    run(system)
    system.residency.evict(AdapterUid("a"))
    system.engine.submit(request("r1", (*SYSTEM, 1), adapter="a"), frozenset(), seed=2)
    run(system)
    assert system.runner.plans[-3].start[0].num_cached == len(SYSTEM)
    system.scheduler.forget_adapter(AdapterUid("a"))
    assert system.allocator.num_free_pages == system.num_pages
    system.engine.submit(request("r2", (*SYSTEM, 1), adapter="a"), frozenset(), seed=3)
    run(system)
    assert [start.num_cached for plan in system.runner.plans for start in plan.start][-1] == 0


def test_when_the_one_that_computes_is_ended_the_next_takes_over() -> None:
    system = make(max_batch_tokens=6, max_num_seqs=6)
    for i in range(3):
        system.engine.submit(request(f"r{i}", (*SYSTEM, i)), frozenset(), seed=i)
    system.engine.step()
    system.engine.abort("r0")
    for _ in range(20):
        system.engine.step()
        system.prefixes.check()
    assert not system.engine.has_work
    # Page 1 was complete when r0 was ended; the others are computed by r1, once.
    assert prefilled(system) == 6 + (len(SYSTEM) - 4 + 1) + 1


def test_cached_pages_are_given_up_for_those_that_run_the_last_of_a_prefix_first() -> None:
    system = make(num_pages=8, max_num_seqs=2)
    system.engine.submit(request("old", (*SYSTEM, 9), max_tokens=2), frozenset(), seed=1)
    run(system)
    assert len(system.prefixes) == 3
    system.engine.submit(request("large", tuple(range(30, 54)), max_tokens=1), frozenset(), seed=2)
    run(system)  # 24 tokens and one more: seven pages of eight
    system.engine.submit(request("again", (*SYSTEM, 9), max_tokens=2), frozenset(), seed=1)
    run(system)
    assert [start.num_cached for plan in system.runner.plans for start in plan.start] == [0, 0, 4]
    assert system.scheduler.num_preemptions == 0


def test_a_preempted_sequence_finds_what_is_left_of_its_pages() -> None:
    system = make(num_pages=10, page_tokens=2, max_num_seqs=4, max_batch_tokens=32)
    for i in range(4):
        system.engine.submit(request(f"r{i}", (i + 1, 2, 3), max_tokens=12), frozenset(), seed=i)
    tokens = run(system)
    assert system.scheduler.num_preemptions > 0
    assert any(start.num_cached for plan in system.runner.plans for start in plan.start)
    assert system.prefixes.counts.hit_tokens == 0, "nobody else has used its pages: they are its own again"
    for i in range(4):
        assert tokens[f"r{i}"] == expected_tokens(None, i, (i + 1, 2, 3), 12, ignore_eos=True)


# ------------------------------------------------------------------ the cache by itself


def test_pages_computed_twice_are_kept_once_and_the_doubles_go_back() -> None:
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, Reclaimer(allocator, Lru()), page_tokens=2)
    root = (None, None)
    owners = [PageOwner(OwnerKind.KV, name) for name in "ab"]
    for owner in owners:  # both ran before either was known
        pages = allocator.alloc(3, owner)
        own = cache.leave(root, [], [1, 2, 3, 4, 5], 5, pages, owner, step=1)
        allocator.free(own, owner)
        cache.check()
    assert len(cache) == 2
    assert allocator.num_free_pages == 8
    allocator.check()


def test_pages_of_a_withdrawn_adapter_stay_with_those_who_read_them() -> None:
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, Reclaimer(allocator, Lru()), page_tokens=2)
    uid = AdapterUid("a")
    owner = PageOwner(OwnerKind.KV, "s")
    pages = allocator.alloc(3, owner)
    allocator.free(cache.leave((uid, None), [], [1, 2, 3, 4, 5], 5, pages, owner, step=1), owner)
    chain, _ = cache.find((uid, None), [1, 2, 3], step=1)
    cache.acquire(chain)
    cache.drop(uid)
    assert len(cache) == 1, "the page that nobody reads is free"
    assert cache.find((uid, None), [1, 2, 3], step=1) == ([], False)
    cache.release(chain)
    assert len(cache) == 0
    assert allocator.num_free_pages == 10
