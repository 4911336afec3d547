"""Far more adapters than the pool holds, requests spread over all of them: every answer right, no page lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import PreTrainedModel

from interleaf import LLM
from tests.support.oracle import Continuation
from tests.support.parity import assert_same, greedy_params
from tests.support.peft_adapters import ALL
from tests.support.tiny_models import VOCAB, make_model, save_model

NUM_TOKENS = 6
MEMORY = "1MiB"
"""About 20 adapters of mean rank beside 16 short sequences; the test counts them."""

Deltas = dict[str, torch.Tensor]


def make_adapter(model: PreTrainedModel, folder: Path, seed: int) -> Deltas:
    """Write a PEFT folder with a random adapter of rank 1 to 8. Returns: s * B @ A by name of the base's weight."""
    generator = torch.Generator().manual_seed(seed)
    rank = 1 + seed % 8
    alpha = 1 + seed % 5
    tensors, deltas = {}, {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in ALL:
            continue
        a = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        deltas[name] = alpha / rank * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ALL),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@torch.inference_mode()
def merged_score(model: PreTrainedModel, deltas: Deltas, prompt: list[int], output: tuple[int, ...]) -> Continuation:
    """What the plain model says with its weights replaced by W + s * B @ A."""
    weights = {name: weight + deltas[name] if name in deltas else weight for name, weight in model.named_parameters()}
    ids = torch.tensor([[*prompt, *output[:-1]]])
    out = functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=True)
    logprobs = out.logits[0, len(prompt) - 1 :].log_softmax(-1)
    return Continuation(tuple(logprobs.argmax(-1).tolist()), logprobs)


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.long)])
def test_every_one_of_many_adapters_answers_as_its_merged_weights_do(tmp_path: Path, count: int) -> None:
    model = make_model("llama3", seed=1)
    deltas = [make_adapter(model, tmp_path / str(i), seed=i) for i in range(count)]
    folders = {f"adapter-{i}": tmp_path / str(i) for i in range(count)}
    generator = torch.Generator().manual_seed(0)
    # Twice each, the second time in another order: by then the first have left the pool and come back.
    order = [*range(count), *torch.randperm(count, generator=generator).tolist()]
    prompts = [torch.randint(3, VOCAB, (5 + i % 20,), generator=generator).tolist() for i in range(len(order))]

    llm = LLM(
        save_model(model, tmp_path / "model"),
        adapters=folders,
        memory=MEMORY,
        page_tokens=4,
        max_model_len=64,
        max_num_seqs=16,
    )
    with llm:
        uids = {llm.parts.registry.uid(name) for name in folders}
        assert len(uids) == count
        outputs = llm.generate(
            prompts, greedy_params(NUM_TOKENS, VOCAB), adapter=[f"adapter-{number}" for number in order]
        )
        stats = llm.stats()
        assert [output.error for output in outputs] == [None] * len(outputs)
        assert stats.registered_adapters == count
        assert 10 <= stats.resident_adapters <= 30, "the pool should hold about 20"
        assert stats.adapter_evictions > count
        assert stats.pool.kv_pages == 0
        assert stats.pool.free_pages + stats.pool.adapter_pages == stats.pool.total_pages
        llm.parts.allocator.check()
        for name in folders:
            llm.remove_adapter(name)
        assert llm.stats().pool.free_pages == stats.pool.total_pages
        llm.parts.allocator.check()

    for number, prompt, output in zip(order, prompts, outputs, strict=True):
        (answer,) = output.outputs
        assert_same(answer, merged_score(model, deltas[number], prompt, answer.token_ids), f"adapter {number}")


def test_the_merged_oracle_tells_adapters_apart(tmp_path: Path) -> None:
    """Else a mix-up of adapters would go unnoticed."""
    model = make_model("llama3", seed=1)
    prompt = list(range(3, 20))
    rows = [merged_score(model, make_adapter(model, tmp_path / str(i), i), prompt, (5,)).logprobs for i in range(20)]
    for i, row in enumerate(rows):
        assert all((row - other).abs().max() > 0.1 for other in rows[:i])
