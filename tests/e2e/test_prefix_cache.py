"""The prefix cache on the CPU engine: the same answers with and without it, everything shared computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interleaf import LLM, SamplingParams
from tests.support.tiny_models import VOCAB, make_model, save_model

SYSTEM_TOKENS = 100
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
ADAPTERS = {name: f"dummy:r=8,targets=all,seed={seed}" for seed, name in enumerate("ab")}
OTHERS = ["b", None, "b", None]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_model(make_model("llama3", seed=3), folder)


def prompts_of(vocab: int, count: int) -> list[list[int]]:
    """`count` prompts that share their first tokens, and 5 tokens of each one's own."""
    generator = torch.Generator().manual_seed(1)
    system = torch.randint(3, vocab, (SYSTEM_TOKENS,), generator=generator).tolist()
    return [system + torch.randint(3, vocab, (5,), generator=generator).tolist() for _ in range(count)]


def answers(llm: LLM, prompts: list[list[int]], adapter: list[str | None]) -> Answers:
    outputs = llm.generate(prompts, GREEDY, adapter=adapter)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def check(model: Path, memory: str, vocab: int) -> None:
    prompts = prompts_of(vocab, 50)
    adapters = ["a"] * 50
    settings = {"adapters": ADAPTERS, "memory": memory, "page_tokens": 16, "max_model_len": 128, "max_num_seqs": 64}
    with LLM(model, **settings) as llm:  # type: ignore[arg-type]
        without = answers(llm, prompts, adapters)
        others_without = answers(llm, prompts[:4], OTHERS)
        assert llm.stats().prefix_hit_tokens == 0
    shared = SYSTEM_TOKENS // 16 * 16
    own = SYSTEM_TOKENS + 5 - shared  # the system prompt's last tokens do not fill a page: everybody's own
    with LLM(model, prefix_cache=True, **settings) as llm:  # type: ignore[arg-type]
        assert answers(llm, prompts, adapters) == without, "all 50 in one step"
        stats = llm.stats()
        assert stats.prefix_miss_tokens == shared + 50 * own
        assert stats.prefix_hit_tokens == 49 * shared
        assert answers(llm, prompts, adapters) == without, "after the first have finished"
        again = llm.stats()
        assert again.prefix_miss_tokens - stats.prefix_miss_tokens <= 50 * own
        assert answers(llm, prompts[:4], OTHERS) == others_without
        assert llm.stats().prefix_miss_tokens - again.prefix_miss_tokens == 2 * (shared + 2 * own)
        pool = llm.stats().pool
        assert pool.kv_pages == 0
        assert pool.prefix_pages > 0
        assert pool.free_pages + pool.kv_pages + pool.prefix_pages + pool.adapter_pages == pool.total_pages
        llm.parts.allocator.check()
        for name in ADAPTERS:
            llm.remove_adapter(name)
        base_only = llm.stats().pool
        assert base_only.adapter_pages == 0
        assert base_only.prefix_pages < pool.prefix_pages


def test_a_tiny_model_answers_the_same_and_computes_what_is_shared_once(model: Path) -> None:
    check(model, "8MiB", VOCAB)


@pytest.mark.long
def test_smollm2_answers_the_same_and_computes_what_is_shared_once(smollm2_gguf: Path) -> None:
    check(smollm2_gguf, "512MiB", 49152)


def test_a_name_reloaded_with_new_weights_never_reuses_old_pages(model: Path) -> None:
    prompts = prompts_of(VOCAB, 3)
    with LLM(model, memory="4MiB", max_model_len=128, prefix_cache=True) as llm:
        fresh = []
        for seed in (0, 1, 0):
            llm.add_adapter("name", f"dummy:r=8,targets=all,seed={seed}")
            fresh.append(answers(llm, prompts, ["name"] * 3))
            assert answers(llm, prompts, ["name"] * 3) == fresh[-1]
            llm.remove_adapter("name")
        assert fresh[0] != fresh[1]
        assert fresh[0] == fresh[2]
    with LLM(model, memory="4MiB", max_model_len=128) as llm:
        llm.add_adapter("name", "dummy:r=8,targets=all,seed=1")
        assert answers(llm, prompts, ["name"] * 3) == fresh[1]


def test_prefixes_give_way_when_the_pool_is_small(model: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB, (60,), generator=generator).tolist() for _ in range(40)]
    found = []
    for prefix_cache in (False, True):
        with LLM(
            model, adapters=ADAPTERS, memory="640KiB", page_tokens=4, max_model_len=96, prefix_cache=prefix_cache
        ) as llm:
            found.append(answers(llm, prompts, [("a", "b", None)[i % 3] for i in range(40)]))
            llm.parts.allocator.check()
    assert found[0] == found[1]
