"""Who can change whose answer: rows of a batch, pages of the pool. Looks into the engine's storage to break it.

Answers are compared bit by bit, over the whole vocabulary, in one process with the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from interleaf import LLM as Engine
from interleaf import CompletionOutput
from interleaf.memory.allocator import OwnerKind, PageOwner
from tests.support.parity import greedy_params
from tests.support.peft_adapters import ALL, Recipe, save_adapter
from tests.support.tiny_models import VOCAB, make_model, save_model

NUM_TOKENS = 16
PAGE_TOKENS = 4
ADAPTERS = ("a", "b", "c")
NAMES = ("a", None, "b", None, None, "c", "a", None, "b", "c", None, None)
"""Base requests between those of adapters."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A model and its adapters on disk."""

    model: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    root = tmp_path_factory.mktemp("isolation")
    model = make_model("qwen3", seed=3)
    recipe = Recipe({"r": 16, "target_modules": list(ALL)}, strength=0.5)
    adapters = {name: save_adapter(model, recipe, root / name, seed=i) for i, name in enumerate(ADAPTERS)}
    return Saved(save_model(model, root / "model"), adapters)


@pytest.fixture(params=[1, 16], ids="page_tokens={}".format)
def llm(saved: Saved, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine whose adapters are all in the pool, so that every request of a batch starts in the same step."""
    with Engine(saved.model, adapters=saved.adapters, memory="4MiB", page_tokens=request.param) as llm:
        answer(llm, NAMES)
        assert llm.stats().resident_adapters == len(ADAPTERS)
        yield llm


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (6 + 3 * i,), generator=generator).tolist() for i in range(count)]


def answer(llm: Engine, names: tuple[str | None, ...]) -> list[CompletionOutput]:
    outputs = llm.generate(prompts(len(names)), greedy_params(NUM_TOKENS, VOCAB), adapter=list(names))
    assert [output.error for output in outputs] == [None] * len(names)
    return [output.outputs[0] for output in outputs]


def rows(completion: CompletionOutput) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at every output position, [n, vocab]."""
    assert completion.logprobs is not None
    out = torch.full((len(completion.logprobs), VOCAB), math.nan)
    for row, entry in zip(out, completion.logprobs, strict=True):
        row[list(entry.top_ids)] = torch.tensor(entry.top)
    return out


def is_all_nan(completion: CompletionOutput) -> bool:
    assert completion.logprobs is not None
    return all(math.isnan(entry.chosen) for entry in completion.logprobs)


def assert_bit_equal(got: CompletionOutput, expected: CompletionOutput) -> None:
    assert not rows(expected).isnan().any()
    assert torch.equal(rows(got), rows(expected))
    assert got.token_ids == expected.token_ids


def poison(llm: Engine, pages: list[int]) -> None:
    assert pages
    llm.parts.pool.data[pages] = math.nan


def pages_of(llm: Engine, name: str) -> list[int]:
    return list(llm.parts.residency.pages(llm.parts.registry.uid(name)))


def free_pages(llm: Engine) -> list[int]:
    allocator = llm.parts.allocator
    return [page for page in range(allocator.num_pages) if allocator.owner(page) is None]


@torch.inference_mode()
def kv_blocks(model: PreTrainedModel, ids: list[int], page_tokens: int) -> list[torch.Tensor]:
    """transformers' KV of these tokens, in blocks of whole pages: [layers, 2, page_tokens, kv_heads, head_dim]."""
    layers = model(input_ids=torch.tensor([ids]), use_cache=True).cache.layers
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers]).transpose(2, 3)
    return [block for block in torch.split(kv, page_tokens, dim=2) if block.shape[2] == page_tokens]


def test_rows_of_base_requests_are_bit_equal_whether_their_neighbours_use_adapters_or_not(llm: Engine) -> None:
    mixed, plain = answer(llm, NAMES), answer(llm, (None,) * len(NAMES))
    for name, one, other in zip(NAMES, mixed, plain, strict=True):
        if name is None:
            assert_bit_equal(one, other)
        else:
            assert not torch.equal(rows(one), rows(other)), "an adapter that does nothing proves nothing"


def test_nan_in_one_adapters_pages_turns_exactly_its_requests_nan(llm: Engine) -> None:
    before = answer(llm, NAMES)
    poison(llm, pages_of(llm, "b"))
    for name, one, other in zip(NAMES, answer(llm, NAMES), before, strict=True):
        if name == "b":
            assert is_all_nan(one)
        else:
            assert_bit_equal(one, other)


def test_an_adapter_that_returns_is_written_afresh_into_pages_full_of_nan(llm: Engine, saved: Saved) -> None:
    before = answer(llm, NAMES)
    poison(llm, pages_of(llm, "b"))
    answer(llm, NAMES)  # leaves NaN in KV pages, too
    llm.remove_adapter("b")
    llm.add_adapter("b", saved.adapters["b"])
    poison(llm, free_pages(llm))
    answer(llm, NAMES)  # b is loaded on the way: the requests do not all start in the same step
    for one, other in zip(answer(llm, NAMES), before, strict=True):
        assert_bit_equal(one, other)


def test_free_pages_full_of_nan_change_nothing(llm: Engine) -> None:
    before = answer(llm, NAMES)
    poison(llm, free_pages(llm))
    for one, other in zip(answer(llm, NAMES), before, strict=True):
        assert_bit_equal(one, other)


def test_after_eviction_the_pages_of_an_adapter_hold_kv(saved: Saved) -> None:
    """The former pages are looked at directly, and compared with the KV cache of transformers."""
    long_prompts = [prompt * 4 for prompt in ([7, 11, 13, 17, 19] * 4, [23, 29, 31, 37] * 5, list(range(40, 60)))]
    with Engine(
        saved.model,
        adapters={"a": saved.adapters["a"]},
        memory="400KiB",  # 66 pages of 6 KiB: the adapter takes 38, each of the sequences 22
        page_tokens=PAGE_TOKENS,
        max_model_len=96,
    ) as llm:
        (first,) = answer(llm, ("a",))
        former = pages_of(llm, "a")
        owner = PageOwner(OwnerKind.ADAPTER, llm.parts.registry.uid("a"))
        assert all(llm.parts.allocator.owner(page) == owner for page in former)
        outputs = llm.generate(long_prompts, greedy_params(8, 0), adapter=None)
        assert pages_of(llm, "a") == [], "the adapter should have had to leave"
        storage = llm.parts.pool.data.clone()
        (again,) = answer(llm, ("a",))
        assert_bit_equal(again, first)

    model = make_model("qwen3", seed=3)
    blocks = [
        block
        for prompt, output in zip(long_prompts, outputs, strict=True)
        for block in kv_blocks(model, [*prompt, *output.outputs[0].token_ids[:-1]], PAGE_TOKENS)
    ]
    holding = [page for page in former if any(torch.allclose(storage[page], b, atol=1e-4) for b in blocks)]
    assert len(holding) > len(former) // 4
