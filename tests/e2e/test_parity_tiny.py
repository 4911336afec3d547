"""Interleaf against transformers + PEFT on small random models of every family: same tokens, same probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from interleaf import LLM, SamplingParams
from tests.support.oracle import Continuation, Oracle
from tests.support.parity import MIN_MARGIN, assert_same, greedy_params
from tests.support.peft_adapters import recipes, save_adapter
from tests.support.tiny_models import FAMILIES, SHAPE, VOCAB, make_model, save_model

NUM_TOKENS = 24
ADAPTERS = (  # each field of a LoraConfig at least once, by family in turn; the 135M model sees them all
    ("rank-1", "rank-pattern", "rslora", "all-linear-but-list", "only-k_proj", "float16"),
    ("rank-3", "alpha-pattern", "regex", "some-layers", "only-down_proj", "bfloat16"),
    ("rank-6", "patterns-rslora", "all-linear", "one-layer", "only-o_proj", "rank-16"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One model with its adapters, and 12 requests with the answers of transformers + PEFT."""

    model: Path
    adapters: dict[str, str]
    prompts: list[list[int]]
    names: list[str | None]
    expected: list[Continuation]


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Prompts of 1 to 70 tokens: longer than the sliding window, than a page and than a chunk of the prefill."""
    number = list(FAMILIES).index(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param, seed=number)
    made = recipes(SHAPE["num_hidden_layers"])
    adapters = {
        name: save_adapter(model, made[name], folder / name, seed=i)
        for i, name in enumerate(ADAPTERS[number % len(ADAPTERS)])
    }
    oracle, generator = Oracle(model), torch.Generator().manual_seed(number)
    names = [None, *adapters, None, *list(adapters)[:4]]
    lengths = (1, 9, 16, 17, 31, 70, 33, 5, 48, 64, 2, 23)
    prompts, expected = [], []
    while len(prompts) < len(lengths):
        name, length = names[len(prompts)], lengths[len(prompts)]
        prompt = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        answer = oracle.greedy(adapters[name] if name else None, prompt, NUM_TOKENS)
        if answer.margin < MIN_MARGIN:
            continue  # a coin toss between two tokens: draw another prompt
        assert name is None or oracle.score(None, prompt, answer.token_ids).token_ids != answer.token_ids
        prompts.append(prompt)
        expected.append(answer)
    model_folder = save_model(model, folder / "model")
    return Case(model_folder, {n: str(p) for n, p in adapters.items()}, prompts, names, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_tokens": 16},
        {"page_tokens": 1, "max_batch_tokens": 24, "max_num_seqs": 12},
        {"page_tokens": 4, "max_batch_tokens": 64, "max_num_seqs": 5, "overlap": False},
    ],
    ids=["defaults", "page-of-1-token-and-small-chunks", "few-seats-without-overlap"],
)
def test_a_mixed_batch_equals_peft(case: Case, settings: dict[str, Any]) -> None:
    with LLM(case.model, adapters=case.adapters, memory="32MiB", **settings) as llm:
        outputs = llm.generate(case.prompts, greedy_params(NUM_TOKENS, VOCAB), adapter=case.names)
    for name, output, expected in zip(case.names, outputs, case.expected, strict=True):
        assert_same(output.outputs[0], expected, name or "base")


def test_requests_one_by_one_equal_peft(case: Case) -> None:
    with LLM(case.model, adapters=case.adapters, memory="32MiB") as llm:
        for name, prompt, expected in zip(case.names, case.prompts, case.expected, strict=True):
            (output,) = llm.generate([prompt], greedy_params(NUM_TOKENS, VOCAB), adapter=name)
            assert_same(output.outputs[0], expected, name or "base")


def test_a_pool_too_small_for_all_at_once_equals_peft(case: Case) -> None:
    """Sequences are preempted and computed again, adapters leave and come back; the answers stay the same."""
    with LLM(case.model, adapters=case.adapters, memory="700KiB", max_model_len=96, admission="optimistic") as llm:
        outputs = llm.generate(case.prompts, greedy_params(NUM_TOKENS, VOCAB), adapter=case.names)
        stats = llm.stats()
    assert stats.adapter_evictions + stats.preemptions > 0, "the pool was large enough for everything"
    for name, output, expected in zip(case.names, outputs, case.expected, strict=True):
        assert_same(output.outputs[0], expected, name or "base")


def test_sampling_parameters_that_change_nothing_leave_the_greedy_answer(case: Case) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_k=1, ignore_eos=True, seed=1, logprobs=0)
    with LLM(case.model, adapters=case.adapters, memory="32MiB") as llm:
        outputs = llm.generate(case.prompts, params, adapter=case.names)
    assert [tuple(o.outputs[0].token_ids) for o in outputs] == [e.token_ids for e in case.expected]
