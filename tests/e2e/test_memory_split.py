"""An engine whose pool is split answers as one that shares it, and says which share is too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from interleaf import LLM, SamplingParams
from interleaf.errors import PoolTooSmall
from tests.support.tiny_models import make_model, save_model

ADAPTERS = {f"a{i}": f"dummy:r={2 + i},targets=all,seed={i}" for i in range(4)}
PAGE_BYTES = 3 * 2 * 4 * 2 * 16 * 4
SETTINGS = {"page_tokens": 4, "max_model_len": 64, "max_num_seqs": 4, "max_batch_tokens": 32, "seed": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_answers_are_those_of_a_shared_pool_and_the_books_add_up(model: Path, prefix_cache: bool) -> None:
    prompts, names = [[5, 6, 7] * (1 + i % 5) for i in range(20)], [f"a{i % 4}" for i in range(20)]
    answers = []
    for split in (None, 0.6):
        with LLM(
            model, adapters=ADAPTERS, memory=100 * PAGE_BYTES, memory_split=split, prefix_cache=prefix_cache, **SETTINGS
        ) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), names)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
            pool = llm.stats().pool
            assert pool.total_pages == 100
            assert pool.free_pages + pool.kv_pages + pool.prefix_pages + pool.adapter_pages == 100
            assert pool.kv_pages == 0
            assert pool.peak_adapter_pages <= (100 if split is None else 60)
            llm.parts.allocator.check()
    assert answers[0] == answers[1]


def test_a_share_that_cannot_hold_the_longest_sequence_is_refused_with_what_would_do(model: Path) -> None:
    with pytest.raises(PoolTooSmall) as refused:
        LLM(model, memory=20 * PAGE_BYTES, memory_split=0.4, **SETTINGS)
    assert (refused.value.needed_pages, refused.value.total_pages) == (16, 12)
    said = str(refused.value)
    assert "their share of the pool has 12" in said
    assert "of which memory_split=0.4 leaves 12 to sequences" in said
    enough = int(said.partition("give at least ")[2].split()[0])
    with LLM(model, memory=enough, memory_split=0.4, **SETTINGS):
        pass
    with pytest.raises(PoolTooSmall):
        LLM(model, memory=enough - PAGE_BYTES, memory_split=0.4, **SETTINGS)


def test_an_adapter_larger_than_its_share_is_refused_and_one_that_fills_it_is_not(model: Path) -> None:
    with LLM(model, memory="1MiB", **SETTINGS) as llm:
        llm.add_adapter("a", "dummy:r=4")
        pages = llm.parts.store.layout(llm.parts.registry.uid("a")).pages
    for share, fits in ((pages, True), (pages - 1, False)):
        total = share + 20
        with LLM(model, memory=total * PAGE_BYTES, memory_split=share / total, **SETTINGS) as llm:
            assert llm.parts.allocator.adapters.num_pages == share
            if fits:
                llm.add_adapter("a", "dummy:r=4")
                (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), adapter="a")
                assert output.error is None
            else:
                with pytest.raises(PoolTooSmall, match=f"needs {pages} pages and the adapters' share of the pool has"):
                    llm.add_adapter("a", "dummy:r=4")
