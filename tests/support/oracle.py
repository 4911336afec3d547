"""What transformers and PEFT say the answer is. Knows nothing of Interleaf.

Two ways to the same truth: `greedy` continues a prompt by itself, token by token; `score` reads a continuation made
elsewhere in one forward, which is ten times faster. A continuation is greedy exactly if at every position it holds the
token that `score` finds most probable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.support.peft_adapters import load_adapter


@dataclass(frozen=True, slots=True)
class Continuation:
    """The most probable token at each output position, and how probable.

    Attributes:
        token_ids: the most probable tokens, [n].
        logprobs: float32 log-probabilities of the whole vocabulary, [n, vocab].
    """

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor

    @property
    def margin(self) -> float:
        """The least difference between the first and the second choice; near 0 the greedy choice is a coin toss."""
        first, second = self.logprobs.topk(2, dim=-1).values.unbind(-1)
        return float((first - second).min())


class Oracle:
    """A transformers model in float32 that wears at most one PEFT adapter at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        assert model.dtype is torch.float32
        self.model = model.eval()

    @contextmanager
    def wearing(self, adapter: Path | None) -> Iterator[torch.nn.Module]:
        """The model with the adapter of a PEFT folder, or as it is; bare again afterwards."""
        if adapter is None:
            yield self.model
            return
        peft_model = load_adapter(self.model, adapter)
        try:
            yield peft_model
        finally:
            peft_model.unload()

    @torch.inference_mode()
    def greedy(self, adapter: Path | None, prompt: Sequence[int], num_tokens: int) -> Continuation:
        """Continue a prompt greedily through the KV cache, end tokens included."""
        with self.wearing(adapter) as model:
            past, rows = None, []
            step = torch.tensor([list(prompt)])
            for _ in range(num_tokens):
                out = model(input_ids=step, cache=past, use_cache=True, logits_to_keep=1)
                past = out.cache
                rows.append(out.logits[0, -1].float().log_softmax(-1))
                step = rows[-1].argmax().view(1, 1)
        logprobs = torch.stack(rows)
        return Continuation(tuple(logprobs.argmax(-1).tolist()), logprobs)

    @torch.inference_mode()
    def score(self, adapter: Path | None, prompt: Sequence[int], output: Sequence[int]) -> Continuation:
        """What would be chosen at each position of `output`, given the prompt and the output before it."""
        with self.wearing(adapter) as model:
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(output)).logits[0]
        logprobs = logits.float().log_softmax(-1)
        return Continuation(tuple(logprobs.argmax(-1).tolist()), logprobs)
