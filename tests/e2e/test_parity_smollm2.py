"""Interleaf against transformers + PEFT on SmolLM2-135M in float32, both reading the same files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from interleaf import LLM, CompletionOutput
from tests.support.gguf_oracle import read_once
from tests.support.oracle import Continuation, Oracle
from tests.support.parity import MIN_MARGIN, assert_same, greedy_params
from tests.support.peft_adapters import recipes, save_adapter

NUM_TOKENS = 24
NUM_LOGPROBS = 5
PROMPTS = [
    [int(token) for token in text.split()]
    for text in (
        "6403 1980 253 655",  # Once upon a time
        "504 3575 282 4649 314",  # The capital of France is
        "1604 3987 46477 24 94 727 2367",  # def fibonacci(n):
        "788 216 33 41 38 41 28 1296 17885 18927 288 260 8872 284",  # In 1969, three astronauts flew to the Moon and
        # Ingredients: two eggs, a cup of flour, some milk and a little salt. First,
        "45394 42 827 5246 28 253 7118 282 7367 28 634 4788 284 253 1838 5420 30 3508 28",
        # Why is the sky blue?, in the model's chat template
        "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 "
        "4898 314 260 6376 4461 47 2 198 1 520 9531 198",
    )
]
BATCHES = 2
"""Mixed batches in `make test`, each with its share of the adapters and the base with every prompt."""

ONE_BY_ONE = (None, "rank-3", "patterns-rslora")
"""What runs in `make test`; `make test-long` takes all."""


@dataclass(frozen=True, slots=True)
class Query:
    """One prompt for one adapter (None: the base model)."""

    adapter: str | None
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class Side:
    """The oracle and the engine, with the same adapters."""

    oracle: Oracle
    llm: LLM
    folders: dict[str, Path]

    def folder(self, query: Query) -> Path | None:
        return self.folders[query.adapter] if query.adapter else None

    def greedy(self, query: Query) -> Continuation:
        return self.oracle.greedy(self.folder(query), query.prompt, NUM_TOKENS)

    def adapted(self) -> list[Query]:
        """Every adapter once."""
        return [Query(name, PROMPTS[i % len(PROMPTS)]) for i, name in enumerate(self.folders)]

    def bare(self) -> list[Query]:
        """The base with every prompt."""
        return [Query(None, prompt) for prompt in PROMPTS]

    def answer(self, queries: list[Query]) -> list[CompletionOutput]:
        """The engine's answers to one batch."""
        params = greedy_params(NUM_TOKENS, NUM_LOGPROBS)
        outputs = self.llm.generate([q.prompt for q in queries], params, adapter=[q.adapter for q in queries])
        return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def sides(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    file = {"pretrained_model_name_or_path": smollm2_gguf.parent, "gguf_file": smollm2_gguf.name}
    with read_once():
        model = AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    made = recipes(model.config.num_hidden_layers)
    folders = {name: save_adapter(model, recipe, root / name, seed=i) for i, (name, recipe) in enumerate(made.items())}
    with LLM(smollm2_gguf, adapters=folders, memory="768MiB", max_model_len=256) as llm:
        yield Side(Oracle(model), llm, folders)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_mixed_batch_of_half_the_adapters_equals_peft(sides: Side, batch: int) -> None:
    """The oracle reads the engine's answers: an answer is greedy exactly if it holds its first choice everywhere."""
    queries = [*sides.adapted()[batch::BATCHES], *sides.bare()]
    assert len(queries) >= 12
    answers = sides.answer(queries)
    for query, answer in zip(queries, answers, strict=True):
        expected = sides.oracle.score(sides.folder(query), query.prompt, answer.token_ids)
        assert expected.margin > MIN_MARGIN, f"{query}: a coin toss among the expected tokens, take another seed"
        assert_same(answer, expected, query.adapter or "base")
    base = dict(zip(map(tuple, PROMPTS), answers[-len(PROMPTS) :], strict=True))
    changed = [
        answer.token_ids != base[tuple(query.prompt)].token_ids for query, answer in zip(queries, answers, strict=True)
    ]
    assert sum(changed) >= 0.9 * (len(queries) - len(PROMPTS)), "most adapters should change the answer"


@pytest.mark.parametrize("name", ONE_BY_ONE, ids=str)
def test_one_request_equals_peft_token_by_token(sides: Side, name: str | None) -> None:
    _compare_alone(sides, next(q for q in (*sides.adapted(), *sides.bare()) if q.adapter == name))


@pytest.mark.long
def test_all_requests_one_by_one_equal_peft_token_by_token(sides: Side) -> None:
    queries = [*sides.adapted(), *sides.bare()]
    worst = max(_compare_alone(sides, query) for query in queries)
    print(f"{len(queries)} requests one by one, largest difference of a log-probability: {worst:.1e}")


@pytest.mark.long
def test_one_batch_of_all_equals_peft_token_by_token(sides: Side) -> None:
    queries = [*sides.adapted(), *sides.bare()]
    worst = max(
        assert_same(answer, sides.greedy(query), query.adapter or "base")
        for query, answer in zip(queries, sides.answer(queries), strict=True)
    )
    print(f"{len(queries)} requests in one batch, largest difference of a log-probability: {worst:.1e}")


def _compare_alone(sides: Side, query: Query) -> float:
    (answer,) = sides.answer([query])
    return assert_same(answer, sides.greedy(query), query.adapter or "base")
