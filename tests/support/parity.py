"""What "equal to PEFT" means: the same greedy tokens, and every log-probability within TOLERANCE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from interleaf import SamplingParams
from interleaf.core import TokenLogprobs
from tests.support.oracle import Continuation

TOLERANCE = 5e-4
"""Absolute, natural logarithm, float32 on both sides."""

MIN_MARGIN = 2 * TOLERANCE
"""Least lead of an expected token over the second choice: below it, equal models may differ in their tokens."""


class Output(Protocol):
    """One sequence's answer, as LLM.generate returns it."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None: ...


def greedy_params(num_tokens: int, logprobs: int) -> SamplingParams:
    """Exactly that many greedy tokens, with that many log-probabilities at each."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=logprobs)


def assert_same(output: Output, expected: Continuation, who: str) -> float:
    """Compare an answer with the oracle's. Returns: the largest difference of a log-probability."""
    assert tuple(output.token_ids) == expected.token_ids, who
    assert output.logprobs is not None, who
    assert len(output.logprobs) == len(output.token_ids), who
    worst = 0.0
    for position, (got, row) in enumerate(zip(output.logprobs, expected.logprobs, strict=True)):
        ids = torch.tensor([expected.token_ids[position], *got.top_ids])
        difference = (torch.tensor([got.chosen, *got.top]) - row[ids]).abs().max().item()
        assert difference <= TOLERANCE, f"{who}, token {position}: log-probabilities differ by {difference:.1e}"
        # The tokens listed are the most probable ones: their probabilities are the largest of the oracle's row.
        largest = row.topk(len(got.top_ids)).values
        assert torch.allclose(torch.tensor(got.top), largest, rtol=0, atol=TOLERANCE), f"{who}, token {position}"
        worst = max(worst, difference)
    return worst
