"""An engine measures its rates at start, leaves no trace of that, and plans the same again when they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from interleaf import LLM, SamplingParams
from interleaf.core import StepPlan
from tests.support.tiny_models import make_model, save_model

ADAPTERS = {f"a{i}": f"dummy:r={2 + i},targets=all,seed={i}" for i in range(6)}
SETTINGS = {"page_tokens": 4, "max_model_len": 64, "max_num_seqs": 4, "max_batch_tokens": 32, "seed": 0}
PROMPTS = [[5, 6, 7] * (1 + i % 4) for i in range(24)]
NAMES = [f"a{(i * i) % 6}" for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("rates"))


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), adapter=NAMES)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_rates_are_measured_and_leave_no_trace(model: Path) -> None:
    with LLM(model, adapters=ADAPTERS, memory="4MiB", **SETTINGS) as llm:
        stats = llm.stats()
        assert stats.copy_rate > 0
        assert stats.prefill_rate > 0
        assert stats.pool.free_pages == stats.pool.total_pages
        assert (stats.steps, stats.adapter_loads, stats.resident_adapters) == (0, 0, 0)
        measured = answers(llm)
        assert llm.stats().copy_rate == stats.copy_rate, "a rate changed while the engine ran"
    with LLM(model, adapters=ADAPTERS, memory="4MiB", copy_rate=1, prefill_rate=1, **SETTINGS) as llm:
        assert (llm.stats().copy_rate, llm.stats().prefill_rate) == (1, 1)
        assert answers(llm) == measured


def plans(model: Path, **rates: int) -> list[StepPlan]:
    """Of a run in a pool that is too small for all adapters and prefixes."""
    seen: list[StepPlan] = []
    with LLM(model, adapters=ADAPTERS, memory=60 * 3072, prefix_cache=True, overlap=False, **SETTINGS, **rates) as llm:
        runner = llm.parts.runner
        launch = runner.launch

        def recorded(plan: StepPlan) -> object:
            seen.append(plan)
            return launch(plan)

        runner.launch = recorded  # type: ignore[method-assign, assignment]
        for _ in range(2):
            answers(llm)
        assert llm.stats().adapter_evictions > 0, "nothing had to leave: this tests nothing"
    return seen


def test_the_same_rates_give_the_same_plans_and_others_may_not(model: Path) -> None:
    first = plans(model, copy_rate=10**9, prefill_rate=1000)
    assert first == plans(model, copy_rate=10**9, prefill_rate=1000)
    assert first != plans(model, copy_rate=10**3, prefill_rate=10**9), "rates decide nothing: this tests nothing"
