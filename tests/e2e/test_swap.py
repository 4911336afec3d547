"""Preemption on the CPU engine: pages that are kept, swapped or computed again change no token."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from interleaf import LLM, SamplingParams
from interleaf.core import PageSwap
from interleaf.engine.swap import HostPages, _runs
from interleaf.memory.eviction import PageCosts
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from tests.support.tiny_models import VOCAB, make_model, save_model

ADAPTERS = {name: f"dummy:r=4,targets=all,seed={seed}" for seed, name in enumerate("ab")}
NUM_REQUESTS = 9
SWAP, RECOMPUTE = PageCosts(adapter_s=1.0, prefix_s=100.0), PageCosts(adapter_s=1.0, prefix_s=1.0)
Answer = tuple[tuple[int, ...], list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3", seed=3), tmp_path_factory.mktemp("tiny"))


def requests() -> list[tuple[list[int], SamplingParams, str | None]]:
    """Prompts of which some begin alike; greedy, seeded and penalised."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(NUM_REQUESTS):
        own = torch.randint(3, VOCAB, (4 + i,), generator=generator).tolist()
        prompt = [5, 6, 7, 8, 9, 10, 11, 12] * (i % 3 == 0) + own
        kind = (
            {"temperature": 0},
            {"temperature": 0.9, "seed": i, "top_p": 0.95},
            {"temperature": 0.7, "seed": i, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        )[i % 3]
        params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, n=1 + (i == 1), **kind)  # type: ignore[arg-type]
        found.append((prompt, params, ("a", "b", None)[i % 3]))
    return found


def serve(llm: LLM) -> list[Answer]:
    prompts, params, adapters = zip(*requests(), strict=True)
    outputs = llm.generate(list(prompts), list(params), adapter=list(adapters))
    assert [output.error for output in outputs] == [None] * NUM_REQUESTS
    found = []
    for sequence in (sequence for output in outputs for sequence in output.outputs):
        assert sequence.logprobs is not None
        found.append((tuple(sequence.token_ids), [of.chosen for of in sequence.logprobs]))
    return found


def fill_with_nan(llm: LLM) -> None:
    """Whatever reads a page or a slot before it was written shows."""
    runner: Any = llm.parts.runner
    llm.parts.pool.data.fill_(torch.nan)
    if runner._swap is not None:
        runner._swap.slots.fill_(torch.nan)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Answer]:
    """The answers from a pool that has room for all."""
    with LLM(model, adapters=ADAPTERS, memory="16MiB", page_tokens=4, max_model_len=64) as llm:
        found = serve(llm)
        assert llm.stats().preemptions == 0
    return found


def small(model: Path, costs: PageCosts = SWAP, **settings: Any) -> LLM:
    """A pool in which a third of the requests find room. Costs are given: those measured differ from run to run."""
    defaults = {"memory": "160KiB", "page_tokens": 4, "max_model_len": 64, "admission": "optimistic", "max_num_seqs": 8}
    llm = LLM(model, adapters=ADAPTERS, **(defaults | settings))
    llm.parts.residency.reclaimer.policy.costs = costs
    return llm


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one[0] == other[0], f"sequence {at}"
        assert one[1] == pytest.approx(other[1], abs=5e-4), f"sequence {at}"


SOME = {
    ("1MiB", "swap", False, "cost", True), ("8KiB", "swap", True, "lru", True),
    ("1MiB", "recompute", False, "cost", False),
}  # fmt: skip
ALL = [
    pytest.param(*case, marks=[] if case in SOME else pytest.mark.long, id="-".join(map(str, case)))
    for case in product(("1MiB", "8KiB", 0), ("swap", "recompute"), (False, True), ("cost", "lru"), (True, False))
]


@pytest.mark.parametrize(("swap_memory", "cheaper", "prefix_cache", "eviction", "overlap"), ALL)
def test_a_pool_too_small_for_all_gives_the_answers_of_a_large_one(
    model: Path, undisturbed: list[Answer], swap_memory: int | str, cheaper: str, prefix_cache: bool, eviction: str,
    overlap: bool,
) -> None:  # fmt: skip
    costs = {"swap": SWAP, "recompute": RECOMPUTE}[cheaper]
    settings = {"swap_memory": swap_memory, "prefix_cache": prefix_cache, "eviction": eviction, "overlap": overlap}
    with small(model, costs, **settings) as llm:
        fill_with_nan(llm)
        assert_same(serve(llm), undisturbed)
        stats = llm.stats()
        assert stats.preemptions > 3
        assert stats.resumed_kept + stats.resumed_swapped + stats.resumed_recomputed == stats.preemptions
        if swap_memory and costs is SWAP:
            assert stats.swap_slots > 0
            assert stats.swap_in_pages > 0
            assert stats.resumed_swapped > 0
        else:
            assert stats.swap_out_pages == 0
            assert stats.recomputed_tokens > 0
        assert stats.swap_used_slots == 0
        assert stats.pool.kv_pages == 0
        llm.parts.allocator.check()
        llm.parts.scheduler.swap.check()


def test_an_adapter_that_is_withdrawn_while_its_sequence_is_swapped_serves_it_to_its_end(
    model: Path, undisturbed: list[Answer]
) -> None:
    with small(model, swap_memory="1MiB") as llm:
        client = llm._client
        ids = [client.submit(prompt, params, adapter) for prompt, params, adapter in requests()]
        tokens: dict[tuple[str, int], list[int]] = {}
        withdrawn = False
        while llm.parts.engine.has_work:
            for event in client.poll():
                if hasattr(event, "token_id"):
                    tokens.setdefault((event.request_id, event.index), []).append(event.token_id)
            if not withdrawn and llm.stats().swap_used_slots:
                withdrawn = True
                for name in ADAPTERS:
                    llm.remove_adapter(name)
        assert withdrawn, "nobody was swapped"
        found = [tuple(tokens[id_, index]) for at, id_ in enumerate(ids) for index in range(1 + (at == 1))]
        assert found == [answer for answer, _ in undisturbed]
        assert llm.stats().pool.adapter_pages == 0
        assert llm.stats().swap_used_slots == 0


def test_closing_while_sequences_are_swapped_gives_everything_back(model: Path) -> None:
    llm = small(model, swap_memory="1MiB")
    client = llm._client
    for prompt, params, adapter in requests():
        client.submit(prompt, params, adapter)
    while not llm.stats().swap_used_slots:
        client.poll()
    scheduler, allocator = llm.parts.scheduler, llm.parts.allocator
    llm.close()
    assert scheduler.swap.num_used_slots == 0
    scheduler.swap.check()
    allocator.check()


def test_pages_and_slots_that_are_neighbours_are_copied_together() -> None:
    swaps = [PageSwap(3, 0), PageSwap(4, 1), PageSwap(6, 2), PageSwap(7, 9), PageSwap(8, 10), PageSwap(2, 11)]
    assert [(first.page, first.slot, count) for first, count in _runs(swaps)] == [
        (3, 0, 2), (6, 2, 1), (7, 9, 2), (2, 11, 1),
    ]  # fmt: skip
    geometry = PageGeometry(2, num_layers=2, num_kv_heads=1, head_dim=4, itemsize_bytes=4)
    pool = PagePool(geometry, 10, torch.float32)
    pool.data.copy_(torch.arange(pool.data.numel()).view_as(pool.data))
    before = pool.data.clone()
    host = HostPages(pool, torch.full((12 * geometry.page_bytes + 5,), 255, dtype=torch.uint8))
    assert len(host.slots) == 12
    host.copy_out(swaps)
    pool.data.fill_(torch.nan)
    host.copy_in(swaps)
    for swap in swaps:
        assert torch.equal(pool.data[swap.page], before[swap.page])
    assert pool.data[[0, 1, 5, 9]].isnan().all()
    assert host.slots[[3, 4, 5, 6, 7, 8]].isnan().all()
