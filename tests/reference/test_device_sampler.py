"""The sampler of GPUs where there is none: over plain torch, and its kernels under Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from interleaf.core import SamplingParams
from interleaf.engine.device_sampler import DeviceSampler
from tests.support.two_samplers import TwoSamplers, normal_logits, random_params
from tests.support.waiting import FILE_OF_TESTS_S

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB = 3000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_state_that_lies_in_tables_gives_the_cpus_tokens_while_sequences_come_and_go(seed, dtype):
    rng = np.random.default_rng(seed)
    both = TwoSamplers(VOCAB, 24, torch.device("cpu"), kernels=False)
    free, taken = list(range(24)), []
    for step in range(12):
        while free and rng.random() < 0.8:
            seat = free.pop(int(rng.integers(len(free))))
            params = random_params(rng, VOCAB, 1024)
            if rng.random() < 0.4:
                params = replace(
                    params,
                    repetition_penalty=float(rng.choice([1.0, 0.7, 1.3])),
                    presence_penalty=float(rng.choice([0.0, -0.5, 1.5])),
                    frequency_penalty=float(rng.choice([0.0, -0.2, 0.7])),
                    min_tokens=int(rng.integers(0, 4)),
                    logprobs=int(rng.integers(0, 4)) if rng.random() < 0.5 else None,
                )
            ids = tuple(rng.integers(0, 60, int(rng.integers(2, 80))).tolist())
            stop = tuple(rng.integers(0, VOCAB + 9, 3).tolist())
            both.start(seat, params, int(rng.integers(-(2**62), 2**62)), ids, int(rng.integers(1, len(ids))), stop)
            taken.append(seat)
        seats = rng.permutation(taken)[: int(rng.integers(1, len(taken) + 1))].tolist()
        both.step(normal_logits(len(seats), 100 * seed + step, VOCAB).to(dtype), seats)
        while taken and rng.random() < 0.5:
            seat = taken.pop(int(rng.integers(len(taken))))
            both.vacate(seat)
            free.append(seat)


def test_more_outputs_of_a_token_than_a_counter_holds_stay_the_most():
    sampler = DeviceSampler(1, 8, torch.device("cpu"), 1)
    penalised = SamplingParams(temperature=0, frequency_penalty=0.1)
    sampler.start(0, penalised, 0, [2] + [3] * 20_000, 1, ())
    for _ in range(2):
        logits = torch.zeros(1, 8)
        logits[0, 3] = 1e6
        assert sampler.sample_outside(logits, [0], torch.tensor([0])).token_ids.tolist() == [3]
    assert sampler._penalties._seen[0].tolist() == [0, 0, 1, 2 * 16_383, 0, 0, 0, 0]


@pytest.mark.timeout(FILE_OF_TESTS_S)
def test_the_kernels_agree_with_the_cpus_sampler_when_interpreted():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_device_sampler.py"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
