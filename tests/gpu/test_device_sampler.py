"""The sampler of GPUs against the CPU's, whose own oracle is test_sampler.py: on a CUDA device, or interpreted.

tests/reference/test_device_sampler.py runs this file under Triton's interpreter in a process of its own.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from interleaf.core import SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

import tests.support.interpreted  # noqa: E402, F401
from interleaf.engine.device_sampler import DeviceSampler, SamplingKind  # noqa: E402
from interleaf.kernels import token_choice  # noqa: E402
from tests.support.two_samplers import TwoSamplers, normal_logits, random_params  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
# The interpreter takes a thousand times as long: smaller blocks give smaller vocabularies as many of them.
VOCAB = 50_001 if ON_GPU else 601
NEAR = 2048 if ON_GPU else 64
SEATS = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(token_choice, "_BLOCK", 256)
        monkeypatch.setattr(token_choice, "_PROGRAMS", 16)
        monkeypatch.setattr(token_choice, "_NEAR", NEAR)


random_logits = partial(normal_logits, vocab=VOCAB)


def both_samplers(vocab: int = VOCAB) -> TwoSamplers:
    return TwoSamplers(vocab, SEATS, DEVICE, kernels=True)


FILTERS = [
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.5),
    SamplingParams(temperature=3.0, top_p=0.95),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=2.0, min_p=0.05, top_k=12, top_p=0.9),
    SamplingParams(temperature=9.0, top_k=NEAR + 7, top_p=0.8),
    SamplingParams(temperature=4.0, min_p=0.001, top_p=0.99),
]


# ---------------------------------------------------------------- chosen tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12 if ON_GPU else 1))
def test_tokens_of_random_batches_are_the_cpus(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    both = both_samplers()
    seats = rng.permutation(SEATS)[: 40 if ON_GPU else 8].tolist()
    for seat in seats:
        both.start(seat, random_params(rng, VOCAB, NEAR), int(rng.integers(-(2**62), 2**62)))
    for step in range(3 if ON_GPU else 1):
        both.step(random_logits(len(seats), 100 * seed + step).to(dtype), rng.permutation(seats).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.bfloat16], ids=str)
def test_ties_at_every_cut_are_kept_from_the_lowest_id_up(dtype: torch.dtype) -> None:
    both = both_samplers()
    logits = (random_logits(len(FILTERS), 5, scale=2.0) * 2).round() / 2
    for seat, params in enumerate(FILTERS):
        both.start(seat, params, seat)
    for _ in range(20 if ON_GPU else 1):
        both.step(logits.to(dtype), list(range(len(FILTERS))))


@pytest.mark.parametrize("vocab", [1, 17, 256, 257] if not ON_GPU else [1, 17, 4096, 4097, 128_256])
def test_any_size_of_vocabulary_will_do(vocab: int) -> None:
    both = both_samplers(vocab)
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, top_p=0.9)]
    for seat, p in enumerate(params):
        both.start(seat, p, seat)
    both.step(random_logits(3, vocab, vocab=vocab).bfloat16(), [0, 1, 2])


def test_of_equal_largest_logits_the_lowest_id_is_chosen_wherever_they_lie() -> None:
    both = both_samplers()
    block = token_choice._BLOCK
    ends = [(0, 1), (0, VOCAB - 1), (block - 1, block), (3, 3 + block), (3, 3 + 2 * block), (VOCAB - 2, VOCAB - 1)]
    logits = torch.full((8, VOCAB), -4.0)
    for row, pair in enumerate(ends):
        logits[row, list(pair)] = 2.5
    logits[6:] = -1.0
    logits[6, 5], logits[6, 9] = -0.0, 0.0
    logits[7, 5], logits[7, 9] = 0.0, -0.0
    for seat in range(8):
        both.start(seat, SamplingParams(temperature=0))
    assert both.step(logits, list(range(8))) == [first for first, _ in ends] + [5, 5]


def test_min_p_comes_before_top_p_though_most_of_the_weight_is_far_below() -> None:
    both = both_samplers()
    for seat in range(4):
        both.start(seat, SamplingParams(min_p=0.5, top_p=0.45), seat)
    logits = torch.full((4, VOCAB), -math.log(VOCAB / 4))  # all but four tokens weigh as much as these
    logits[:, [3, 50, 200, VOCAB - 1]] = 0.0
    assert set(both.step(logits.bfloat16(), list(range(4)))) == {3, 50}


def test_more_tokens_may_be_kept_than_the_list_of_the_largest_holds() -> None:
    both = both_samplers()
    for seat in range(2):
        both.start(seat, SamplingParams(temperature=50.0, top_k=4 * NEAR), seat)
    logits = normal_logits(2, 6, VOCAB)
    tokens = both.step(logits.bfloat16(), [0, 1])
    ranks = [int((logits[row] > logits[row, token]).sum()) for row, token in enumerate(tokens)]
    assert max(ranks) > NEAR


def test_draws_from_the_whole_vocabulary_are_the_cpus() -> None:
    both = both_samplers()
    for seat in range(SEATS if ON_GPU else 6):
        both.start(seat, SamplingParams(temperature=[0.0, 0.5, 1.0, 3.0][seat % 4]), seat)
    seats = list(range(SEATS if ON_GPU else 6))
    assert both.device.kind(seats) is SamplingKind.DRAWN
    for step in range(10 if ON_GPU else 2):
        both.step(random_logits(len(seats), step), seats)


def test_a_flat_row_is_drawn_from_evenly() -> None:
    both = both_samplers()
    for seat in range(4):
        both.start(seat, SamplingParams(top_k=[0, VOCAB - 1, 0, 0][seat], top_p=[1.0, 1.0, 0.5, 0.999][seat]), seat)
    tokens = both.step(torch.zeros(4, VOCAB).bfloat16(), [0, 1, 2, 3])
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("bad", ["nan", "one nan", "-inf", "inf"])
def test_a_sick_row_gives_some_token_and_leaves_the_others_alone(bad: str) -> None:
    both = both_samplers()
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5)]
    for seat in range(8):
        both.start(seat, params[seat % 4], seat)
    both.device.flush()
    logits = random_logits(8, 3).bfloat16()
    sick = logits.clone()
    where = slice(None) if bad in ("nan", "-inf") else slice(40, 41)
    sick[:4, where] = float(bad.split()[-1])
    seats = torch.arange(8, device=DEVICE)
    tokens = both.device.choose(sick.to(DEVICE), seats, SamplingKind.FILTERED).tolist()
    assert all(0 <= t < VOCAB for t in tokens)
    if bad == "inf":
        assert tokens[:4] == [40] * 4
    assert tokens[4:] == both.cpu.sample(logits, range(8)).token_ids.tolist()[4:]


# ---------------------------------------------------------------- state


def test_a_sequence_goes_on_in_any_seat_and_batch_and_seats_change_hands() -> None:
    both = both_samplers()
    drawn, greedy = SamplingParams(temperature=1.5), SamplingParams(temperature=0)
    for seat in range(6):
        both.start(seat, drawn if seat % 2 else greedy, seat)
    both.step(random_logits(6, 0), [5, 3, 1, 0, 2, 4])
    outputs = both.step(random_logits(2, 1), [3, 0])
    both.vacate(3)
    both.start(3, greedy, 9)
    both.start(7, drawn, 3, (1, 2, *outputs), 2)  # a preempted sequence with two outputs
    for step in range(3):
        both.step(random_logits(4, 2 + step), [7, 0, 3, 5])


def test_rows_of_the_padding_seat_change_nothing() -> None:
    both = both_samplers()
    for seat in range(3):
        both.start(seat, SamplingParams(temperature=1.5), seat)
    both.device.flush()
    logits = random_logits(8, 0)
    padded = torch.tensor([2, 0, 1] + [SEATS] * 5, device=DEVICE)
    for _ in range(2):
        tokens = both.device.choose(logits.to(DEVICE), padded, SamplingKind.DRAWN)
        want = both.cpu.sample(logits[:3], [2, 0, 1]).token_ids.tolist()
        assert tokens[:3].tolist() == want
        assert both.device.last_token[[2, 0, 1]].tolist() == want
        assert 0 <= int(both.device.last_token[SEATS]) < VOCAB


def test_kinds_are_those_of_the_most_demanding_row() -> None:
    both = both_samplers()
    params = [
        SamplingParams(temperature=0, top_k=5),
        SamplingParams(top_k=VOCAB),
        SamplingParams(min_p=0.1),
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0, presence_penalty=0.1),
    ]
    for seat, p in enumerate(params):
        both.start(seat, p)
    kind = both.device.kind
    assert [kind([seat]) for seat in range(5)] == [
        SamplingKind.GREEDY,
        SamplingKind.DRAWN,
        SamplingKind.FILTERED,
        SamplingKind.OUTSIDE,
        SamplingKind.OUTSIDE,
    ]
    assert kind([1, 0]) is SamplingKind.DRAWN
    assert kind((0, 2, 1)) is SamplingKind.FILTERED
    assert kind([0, 4]) is SamplingKind.OUTSIDE
    assert kind([]) is SamplingKind.GREEDY


def test_more_rows_than_there_is_scratch_for_are_refused() -> None:
    sampler = DeviceSampler(4, 32, DEVICE, max_rows=2, kernels=True)
    with pytest.raises(ValueError, match="3 rows are sampled, but at most 2 can be"):
        sampler.choose(torch.zeros(3, 32, device=DEVICE), torch.full((3,), 4, device=DEVICE), SamplingKind.GREEDY)


# ---------------------------------------------------------------- outside the graph


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_penalties_bans_and_logprobs_are_the_cpus_step_after_step(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    both = both_samplers()
    vocab_prompt = tuple(rng.integers(0, 40, 30).tolist())
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=-0.3, logprobs=3),
        SamplingParams(temperature=0.7, frequency_penalty=0.7, repetition_penalty=0.7, min_tokens=2),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, min_tokens=3, logprobs=2),
        SamplingParams(temperature=1.2),
        SamplingParams(temperature=0.7, top_k=5, presence_penalty=-2.0),
    ]
    for seat, p in enumerate(params):
        both.start(seat, p, seat, vocab_prompt, 25 if p.has_penalties else 30, (7, 8, VOCAB + 3))
    logits = random_logits(len(params), 4)
    logits[:, :40] += 6.0
    logits[:, 7] += 6.0
    for _ in range(4):
        both.step(logits.to(dtype), [3, 1, 0, 2, 6, 5, 4])


def test_a_seat_whose_minimum_is_reached_goes_back_into_the_graph() -> None:
    both = both_samplers()
    both.start(0, SamplingParams(temperature=0, min_tokens=3), 0, (1, 2), 1, (5,))  # one output is known
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 9] = 9.0, 8.0
    assert both.step(logits, [0]) == [9]
    assert both.device.kind([0]) is SamplingKind.OUTSIDE
    assert both.step(logits, [0]) == [9]
    assert both.device.kind([0]) is SamplingKind.GREEDY
    assert both.step(logits, [0]) == [5]


def test_counters_are_kept_for_penalised_sequences_only_and_used_again() -> None:
    both = both_samplers()
    for seat in range(SEATS):
        both.start(seat, SamplingParams())
    assert both.device._penalties.num_slots == 0
    both.vacate(0)
    for _ in range(5):
        both.start(0, SamplingParams(presence_penalty=1.0))
        both.vacate(0)
    assert both.device._penalties.num_slots == 1


def test_logprobs_of_ties_are_listed_by_id_and_those_of_a_row_of_nan_not_at_all() -> None:
    both = both_samplers()
    for seat in range(3):
        both.start(seat, SamplingParams(temperature=0, logprobs=5))
    logits = random_logits(3, 8).round()
    logits[1] = torch.nan
    logits[2, :] = -torch.inf
    logits[2, [600, 30]] = 1.0
    both.device.flush()
    there = logits.to(DEVICE)
    pending = both.device.sample_outside(there, [0, 1, 2], torch.arange(3, device=DEVICE))
    entries = pending.read_back(lambda size: torch.empty(size, dtype=torch.uint8))().logprobs
    assert entries is not None
    assert all(entries)
    ids = sorted(range(VOCAB), key=lambda t: (-logits[0, t].item(), t))[:5]
    assert entries[0].top_ids == tuple(ids)
    assert math.isnan(entries[1].chosen)
    assert entries[1].top_ids == ()
    assert entries[2].top_ids[:3] == (30, 600, 0)
    assert entries[2].chosen == pytest.approx(-math.log(2))
    assert entries[2].rank == 2


# ---------------------------------------------------------------- on the device


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.DRAWN, SamplingKind.FILTERED])
def test_a_captured_graph_samples_for_whoever_sits_in_the_seats(kind: SamplingKind) -> None:
    both = both_samplers()
    params = {
        SamplingKind.GREEDY: SamplingParams(temperature=0),
        SamplingKind.DRAWN: SamplingParams(),
        SamplingKind.FILTERED: SamplingParams(temperature=2.0, top_p=0.9),
    }[kind]
    both.device.warm_up(torch.bfloat16)
    logits = torch.zeros(32, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    seats = torch.full((32,), SEATS, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = both.device.choose(logits, seats, kind)
    for step in range(6):
        both.start(step, replace(params, top_k=step) if kind is SamplingKind.FILTERED else params, step)
        both.device.flush()
        now = list(range(step + 1))
        fresh = random_logits(32, step).bfloat16()
        logits.copy_(fresh)
        seats[: len(now)] = torch.tensor(now, device=DEVICE)
        graph.replay()
        assert tokens[: len(now)].tolist() == both.cpu.sample(fresh[: len(now)], now).token_ids.tolist()


@pytest.mark.skipif(not ON_GPU, reason="needs a device to wait for")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits_for_the_device() -> None:
    both = both_samplers()
    both.device.warm_up(torch.bfloat16)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.9),
        SamplingParams(repetition_penalty=1.2, logprobs=5),
        SamplingParams(temperature=0, min_tokens=2),
    ]
    logits = random_logits(4, 0).bfloat16().to(DEVICE)
    seats = torch.arange(4, device=DEVICE)
    pinned = torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    for round_ in range(2):  # the first fills the caches of allocators
        if round_:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for seat, p in enumerate(params):
                both.device.start(seat, p, seat, [1, 2, 3], 2, (5,))
            both.device.flush()
            for _ in range(3):
                both.device.sample_outside(logits, [0, 1, 2, 3], seats).read_back(lambda size: pinned[:size])
            both.device.choose(logits, seats, SamplingKind.FILTERED)
            for seat in range(4):
                both.device.vacate(seat)
        finally:
            torch.cuda.set_sync_debug_mode("default")
