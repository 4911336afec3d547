"""The sampler of GPUs beside the CPU's: one step of both, compared in all that they give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interleaf.core import SamplingParams
from interleaf.engine.device_sampler import DeviceSampler, SamplingKind
from interleaf.engine.sampler import Sampler


class TwoSamplers:
    """The same sequences in the sampler of GPUs, on any device, and in that of the CPU.

    Attributes:
        exact: both round alike, so that log-probabilities must be equal to the bit.
    """

    def __init__(self, vocab: int, num_seats: int, device: torch.device, *, kernels: bool) -> None:
        self.where = device
        self.exact = device.type == "cpu"
        self.device = DeviceSampler(num_seats, vocab, device, max_rows=num_seats, kernels=kernels)
        self.cpu = Sampler(num_seats, vocab, torch.device("cpu"))

    def start(
        self,
        seat: int,
        params: SamplingParams,
        seed: int = 0,
        token_ids: tuple[int, ...] = (1,),
        prompt_tokens: int | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        for sampler in (self.device, self.cpu):
            sampler.start(seat, params, seed, token_ids, prompt_tokens or len(token_ids), stop_ids)

    def vacate(self, seat: int) -> None:
        self.device.vacate(seat)
        self.cpu.vacate(seat)

    def step(self, logits: torch.Tensor, seats: list[int]) -> list[int]:
        """Sample from both, compare all that they give, and return the tokens."""
        self.device.flush()
        kind = self.device.kind(seats)
        there, seats_there = logits.to(self.where), torch.tensor(seats, device=self.where)
        want = self.cpu.sample(logits, seats)
        if kind is SamplingKind.OUTSIDE:
            pending = self.device.sample_outside(there, seats, seats_there)
            finish = pending.read_back(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=not self.exact))
            if not self.exact:
                torch.cuda.synchronize()
            result = finish()
            tokens, logprobs = list(result.token_ids), result.logprobs
        else:
            tokens, logprobs = self.device.choose(there, seats_there, kind).tolist(), None
        assert tokens == want.token_ids.tolist()
        assert self.device.last_token[seats].tolist() == tokens
        assert (logprobs is None) == (want.logprobs is None)
        for got, expected in zip(logprobs or (), want.logprobs or (), strict=True):
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                # Logits up to 32 have an ulp of 2e-6; a GPU sums the exponentials in an order of its own.
                near = 2e-6 if self.exact else 2e-5
                assert got.chosen == pytest.approx(expected.chosen, abs=near, nan_ok=True)
                assert got.top == pytest.approx(expected.top, abs=near)
                if self.exact:  # else rounding may tell two equal tokens apart, or not
                    assert (got.top_ids, got.rank) == (expected.top_ids, expected.rank)
        return tokens


def normal_logits(rows: int, seed: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_params(rng: np.random.Generator, vocab: int, near: int) -> SamplingParams:
    def maybe(values: list[float], off: float) -> float:
        return float(rng.choice(values)) if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=maybe([0.0, 0.3, 1.7, 5.0], 1.0),
        top_k=int(maybe([1, 2, 7, 50, near, near + 1, vocab - 1, vocab + 5], 0)),
        top_p=maybe([1e-9, 0.2, 0.9, 0.9999], 1.0),
        min_p=maybe([1e-6, 0.01, 0.3, 1.0], 0.0),
    )
