"""The sampler against a float64 loop over one row at a time, written from SamplingParams' docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interleaf.core import SamplingParams
from interleaf.engine import sampling_math
from interleaf.engine.penalties import PenaltyBook
from interleaf.engine.sampler import Sampler
from interleaf.engine.sampling_math import stream_key, uniforms

CPU = torch.device("cpu")
VOCAB = 3000  # more than FILTER_WIDTH, and no multiple of the block that rows are searched in


# ---------------------------------------------------------------- the oracle


def oracle_uniform(seed: int, index: int) -> float:
    """SplitMix64 on Python's integers: output `index` of the stream that starts at the hashed seed."""
    mask = (1 << 64) - 1

    def finalise(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    start = finalise((seed + 0x9E3779B97F4A7C15) & mask)
    return (finalise((start + (index + 1) * 0x9E3779B97F4A7C15) & mask) >> 11) / 2**53


def oracle_penalised(
    logits: np.ndarray, params: SamplingParams, token_ids: list[int], prompt_tokens: int, stop_ids: tuple[int, ...] = ()
) -> np.ndarray:
    out = logits.astype(np.float64)
    outputs, seen = token_ids[prompt_tokens:], set(token_ids)
    for t in range(len(out)):
        if t in seen:
            out[t] = out[t] / params.repetition_penalty if out[t] > 0 else out[t] * params.repetition_penalty
        if t in outputs:
            out[t] -= params.presence_penalty + params.frequency_penalty * outputs.count(t)
    if len(outputs) < params.min_tokens:
        for t in stop_ids:
            out[t] = -math.inf
    return out


def oracle_kept(logits: np.ndarray, params: SamplingParams) -> tuple[list[int], list[float], float]:
    """Kept tokens, most probable first; their probabilities; how far from another answer rounding would have to go."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    ratio = [math.exp((logits[t] - logits[order[0]]) / params.temperature) for t in order]
    margin = 1.0
    kept = len(order)
    if params.min_p > 0:
        kept = sum(r >= params.min_p for r in ratio)
        margin = min(margin, min((abs(r / params.min_p - 1) for r in ratio if r != 1.0), default=1.0))
    if params.top_k:
        kept = min(kept, params.top_k)
    if params.top_p < 1:
        total = math.fsum(ratio[:kept])
        mass = 0.0
        for n in range(kept):
            mass += ratio[n] / total
            margin = min(margin, abs(mass - params.top_p))
            if mass >= params.top_p:
                kept = n + 1
                break
    total = math.fsum(ratio[:kept])
    return order[:kept], [r / total for r in ratio[:kept]], margin


def oracle_token(logits: np.ndarray, params: SamplingParams, uniform: float) -> tuple[int, float]:
    if params.temperature == 0:
        return min(range(len(logits)), key=lambda t: (-logits[t], t)), 1.0
    kept, probabilities, margin = oracle_kept(logits, params)
    pairs = list(zip(kept, probabilities, strict=True))
    if not (0 < params.top_k < len(logits) or params.top_p < 1 or params.min_p > 0):
        pairs.sort()  # without a filter the walk is by id
    ends = np.cumsum([p for _, p in pairs])
    place = min(int(np.searchsorted(ends, uniform, side="right")), len(pairs) - 1)
    return pairs[place][0], min(margin, float(np.abs(ends[:-1] - uniform).min(initial=1.0)))


# ---------------------------------------------------------------- helpers


def changed_settings(params: SamplingParams) -> str:
    return ",".join(f"{f.name}={v}" for f in fields(params) if (v := getattr(params, f.name)) != f.default)


@dataclass
class Row:
    params: SamplingParams
    seed: int
    token_ids: list[int]
    prompt_tokens: int
    stop_ids: tuple[int, ...] = ()


def started(rows: dict[int, Row], vocab: int = VOCAB, num_seats: int = 64) -> Sampler:
    sampler = Sampler(num_seats, vocab, CPU)
    for seat, row in rows.items():
        sampler.start(seat, row.params, row.seed, row.token_ids, row.prompt_tokens, row.stop_ids)
    return sampler


def random_logits(rows: int, seed: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def random_row(rng: np.random.Generator, vocab: int = VOCAB) -> Row:
    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    params = SamplingParams(
        temperature=maybe(float(rng.choice([0.0, 0.3, 1.0, 1.7, 5.0])), 1.0),
        top_k=int(maybe(int(rng.choice([1, 2, 7, 50, 1024, 1025, vocab, vocab + 5])), 0)),
        top_p=maybe(float(rng.choice([1e-9, 0.2, 0.9, 0.9999])), 1.0),
        min_p=maybe(float(rng.choice([1e-6, 0.01, 0.3, 1.0])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.7, 1.3])), 1.0),
        presence_penalty=maybe(float(rng.choice([-0.5, 1.5])), 0.0),
        frequency_penalty=maybe(float(rng.choice([-0.2, 0.7])), 0.0),
        min_tokens=int(maybe(2, 0)),
        logprobs=int(rng.integers(0, 4)) if rng.random() < 0.3 else None,
    )
    prompt = rng.integers(0, vocab, int(rng.integers(1, 80))).tolist()
    return Row(
        params, int(rng.integers(-(2**62), 2**62)), prompt, len(prompt), tuple(rng.integers(0, vocab, 3).tolist())
    )


# ---------------------------------------------------------------- chosen tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_every_token_of_random_mixed_batches_is_the_oracles(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    seats = rng.permutation(64)[:9].tolist()
    rows = {seat: random_row(rng) for seat in seats}
    sampler = started(rows)
    compared = 0
    for step in range(4):
        logits = random_logits(len(seats), 100 * seed + step).to(dtype)
        before = logits.clone()
        chosen = sampler.sample(logits, seats).token_ids.tolist()
        assert torch.equal(logits, before)
        for i, seat in enumerate(seats):
            row = rows[seat]
            changed = oracle_penalised(
                logits[i].float().numpy(), row.params, row.token_ids, row.prompt_tokens, row.stop_ids
            )
            # Penalties are float32; rounding there must not decide between equal tokens for the oracle alone.
            uniform = oracle_uniform(row.seed, len(row.token_ids) - row.prompt_tokens)
            token, margin = oracle_token(changed.astype(np.float32), row.params, uniform)
            if margin > 2e-6:
                compared += 1
                assert chosen[i] == token, (step, row.params)
            row.token_ids.append(chosen[i])
    assert compared >= 20  # of 36: min_p = 1e-6 cuts among thousands of tokens, often too close to call


@pytest.mark.parametrize("width", [16, 1024])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_k=20),
        SamplingParams(top_k=16),
        SamplingParams(top_k=17, top_p=0.8),
        SamplingParams(temperature=1.3, top_p=0.5),
        SamplingParams(temperature=3.0, top_p=0.95),
        SamplingParams(min_p=0.02),
        SamplingParams(temperature=2.0, min_p=0.05, top_k=12, top_p=0.9),
        SamplingParams(min_p=0.3, top_p=0.9),
    ],
    ids=changed_settings,
)
def test_exactly_the_oracles_tokens_can_be_drawn(
    params: SamplingParams, quantised: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_math, "FILTER_WIDTH", width)
    vocab, grid = 100, 6_000
    logits = random_logits(1, 5, vocab, 2.0)
    if quantised:
        logits = (logits * 2).round() / 2  # ties everywhere, at each cut too
    kept, probabilities, margin = oracle_kept(logits[0].numpy().astype(np.float64), params)
    assert margin > 1e-6
    assert min(probabilities) > 2 / grid
    uniform = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    rows = logits.expand(grid, vocab).clone()
    only_top_p = not params.top_k and params.min_p == 0
    filters = sampling_math.Filters(
        top_k=torch.full((grid,), params.top_k or vocab),
        top_p=torch.full((grid,), params.top_p, dtype=torch.float64),
        min_p=torch.full((grid,), params.min_p, dtype=torch.float64),
        nucleus=torch.full((grid,), only_top_p),
        num_nucleus=grid if only_top_p else 0,
    )
    best = rows.argmax(-1)
    drawn = sampling_math.draw(rows, best, torch.full((grid,), params.temperature), filters, uniform)
    counts = torch.bincount(drawn, minlength=vocab)
    assert set(counts.nonzero()[:, 0].tolist()) == set(kept)
    # A grid of uniforms counts each token's probability to within one.
    assert np.abs(counts[kept].numpy() - np.array(probabilities) * grid).max() <= 1.01


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
    ],
    ids=changed_settings,
)
def test_tokens_of_many_outputs_and_seeds_follow_the_distribution(params: SamplingParams) -> None:
    vocab, num_seats, steps = 40, 50, 200
    logits = random_logits(1, 11, vocab, 1.5)
    kept, probabilities, _ = oracle_kept(logits[0].numpy().astype(np.float64), params)
    sampler = started({s: Row(params, s, [1], 1) for s in range(num_seats)}, vocab)
    counts = np.zeros(vocab)
    for _ in range(steps):
        counts += np.bincount(
            sampler.sample(logits.expand(num_seats, vocab), range(num_seats)).token_ids, minlength=vocab
        )
    expected = np.array(probabilities) * num_seats * steps
    assert counts.sum() == counts[kept].sum()
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


@given(seed=st.integers(-(2**63) + 1, 2**63 - 1), index=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_uniforms_are_splitmix64(seed: int, index: int) -> None:
    got = uniforms(torch.tensor([stream_key(seed)]), torch.tensor([index]))
    assert got.item() == oracle_uniform(seed, index)


def test_uniforms_of_neighbouring_seeds_and_outputs_are_spread_evenly() -> None:
    keys = torch.tensor([stream_key(s) for s in range(200)])
    table = torch.stack([uniforms(keys, torch.full((200,), i)) for i in range(200)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    counts = torch.histc(table.float(), bins=64, min=0, max=1)
    assert ((counts - 625) ** 2 / 625).sum() < 63 + 4 * math.sqrt(126)
    for a, b in [(table[1:], table[:-1]), (table[:, 1:], table[:, :-1])]:
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.02


# ---------------------------------------------------------------- what a token must not depend on


def test_a_sequence_gets_the_same_tokens_alone_and_anywhere_in_any_batch() -> None:
    rng = np.random.default_rng(3)
    rows = [random_row(rng) for _ in range(24)]
    logits = random_logits(24, 17)
    alone = [int(started({0: row}).sample(logits[i : i + 1], [0]).token_ids) for i, row in enumerate(rows)]
    for trial in range(4):
        picked = rng.permutation(24)[: int(rng.integers(2, 25))].tolist()
        seats = rng.permutation(64)[: len(picked)].tolist()
        sampler = started({seat: rows[i] for seat, i in zip(seats, picked, strict=True)})
        together = sampler.sample(logits[picked], np.array(seats)).token_ids.tolist()
        assert together == [alone[i] for i in picked], trial


def test_a_preempted_sequence_goes_on_with_the_same_tokens_in_another_seat() -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=9)
    row = Row(params, 99, [5, 6, 7], 3, (8, 9))
    logits = [random_logits(1, s) for s in range(12)]
    whole = started({0: row})
    expected = [int(whole.sample(x, [0]).token_ids) for x in logits]

    first = started({0: row})
    outputs = [int(first.sample(x, [0]).token_ids) for x in logits[:5]]
    first.vacate(0)
    first.start(0, SamplingParams(presence_penalty=2.0), 1, [1], 1, ())  # somebody else sits there now
    first.start(3, row.params, row.seed, row.token_ids + outputs, 3, row.stop_ids)
    outputs += [int(first.sample(torch.cat([x, x]), [0, 3]).token_ids[1]) for x in logits[5:]]
    assert outputs == expected


def test_a_seat_that_changes_hands_forgets_the_sequence_before() -> None:
    greedy = SamplingParams(temperature=0, repetition_penalty=10.0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    sampler = started({0: Row(greedy, 0, [1], 1)})
    assert [int(sampler.sample(logits, [0]).token_ids) for _ in range(2)] == [7, 8]
    sampler.vacate(0)
    sampler.start(0, greedy, 0, [1], 1, ())
    assert int(sampler.sample(logits, [0]).token_ids) == 7


def test_a_row_of_nan_or_infinity_leaves_the_other_rows_alone() -> None:
    rng = np.random.default_rng(8)
    rows = {s: random_row(rng) for s in range(40)}
    for s, row in rows.items():
        rows[s] = replace(row, params=replace(row.params, logprobs=2))
    logits = random_logits(40, 21)
    sick = logits.clone()
    bad = list(range(0, 40, 3))
    for n, r in enumerate(bad):
        match n % 5:
            case 0:
                sick[r] = torch.nan
            case 1:
                sick[r, 17] = torch.nan
            case 2:
                sick[r] = -torch.inf
            case 3:
                sick[r, 40] = torch.inf
            case 4:
                sick[r, 40:60] = torch.inf
    well, ill = (started(rows).sample(x, range(40)) for x in (logits, sick))
    assert well.logprobs is not None
    assert ill.logprobs is not None
    for r in range(40):
        if r in bad:
            assert 0 <= int(ill.token_ids[r]) < VOCAB
            entry = ill.logprobs[r]
            assert entry is not None
            assert math.isnan(entry.chosen)
            if torch.isposinf(sick[r]).any():
                assert int(ill.token_ids[r]) == 40
        else:
            assert ill.token_ids[r] == well.token_ids[r]
            assert ill.logprobs[r] == well.logprobs[r]


# ---------------------------------------------------------------- penalties and min_tokens


@pytest.mark.parametrize("seed", range(4))
def test_penalised_logits_are_the_oracles_while_lists_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    book = PenaltyBook(VOCAB, CPU)
    rows = {}
    for seat in (4, 9, 2):
        params = SamplingParams(
            repetition_penalty=float(rng.uniform(0.5, 2)),
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
        )
        ids = rng.integers(0, 50, int(rng.integers(1, 70))).tolist()
        rows[seat] = Row(params, 0, ids, int(rng.integers(1, len(ids) + 1)))
        book.open(seat, params, ids, rows[seat].prompt_tokens)
    view = book.rows([9, 2])
    for step in range(80):
        if step % 20 == 0:
            logits = random_logits(5, step)
            got = logits.clone()
            book.apply(got, torch.tensor([3, 1]), view)
            for at, seat in ((3, 9), (1, 2)):
                row = rows[seat]
                want = oracle_penalised(logits[at].numpy(), row.params, row.token_ids, row.prompt_tokens)
                np.testing.assert_allclose(got[at], want, rtol=2e-6, atol=2e-5)
            assert torch.equal(got[[0, 2, 4]], logits[[0, 2, 4]])
        tokens = rng.integers(0, 50, 2).tolist()
        book.record(view, torch.tensor(tokens))
        for seat, token in zip((9, 2), tokens, strict=True):
            rows[seat].token_ids.append(token)


def test_counters_are_kept_for_penalised_sequences_only_and_used_again() -> None:
    sampler = started({s: Row(SamplingParams(), 0, [1], 1) for s in range(60)})
    assert sampler._penalties.num_slots == 0
    for _ in range(5):
        sampler.start(60, SamplingParams(presence_penalty=1.0), 0, [1, 2], 2, ())
        sampler.vacate(60)
    assert sampler._penalties.num_slots == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_is_chosen_before_min_tokens_outputs(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3, max_tokens=9, logprobs=1)
    logits = torch.zeros(2, VOCAB)
    logits[:, [10, 20]] = 50.0
    logits[:, 30] = 20.0
    # The second sequence has one output already, and an end token that the vocabulary does not hold.
    rows = {0: Row(params, 1, [5], 1, (10, 20)), 1: Row(params, 2, [5, 6], 1, (20, 10, VOCAB + 7))}
    sampler = started(rows)
    steps = [sampler.sample(logits, [0, 1]) for _ in range(4)]
    tokens = torch.stack([s.token_ids for s in steps]).tolist()
    assert [t[0] for t in tokens[:3]] == [30, 30, 30]
    assert [t[1] for t in tokens[:2]] == [30, 30]
    assert {tokens[3][0], tokens[2][1], tokens[3][1]} <= {10, 20}
    assert steps[0].logprobs is not None
    assert steps[0].logprobs[0] is not None
    assert steps[0].logprobs[0].top_ids == (10,)  # log-probabilities are of the model's own distribution


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_those_of_log_softmax_of_the_raw_logits(dtype: torch.dtype) -> None:
    asks = [None, 0, 1, 5, 20, 1000]
    params = [SamplingParams(temperature=3.0, repetition_penalty=2.0, logprobs=n) for n in asks]
    sampler = started({s: Row(p, s, [s + 1], 1) for s, p in enumerate(params)})
    logits = random_logits(len(asks), 33).to(dtype)
    result = sampler.sample(logits, range(len(asks)))
    expected = torch.log_softmax(logits.float(), -1)
    assert result.logprobs is not None
    assert result.logprobs[0] is None
    for r, n in list(enumerate(asks))[1:]:
        entry = result.logprobs[r]
        assert entry is not None
        assert n is not None
        chosen = expected[r, result.token_ids[r]]
        assert entry.chosen == pytest.approx(chosen.item(), abs=1e-6)
        assert entry.rank == int((expected[r] >= chosen).sum())
        order = sorted(range(VOCAB), key=lambda t: (-expected[r, t].item(), t))[:n]
        assert entry.top_ids == tuple(order)
        assert entry.top == pytest.approx(expected[r, order].tolist(), abs=1e-6)


def test_logprobs_beyond_the_vocabulary_list_all_of_it_and_are_none_if_nobody_asks() -> None:
    logits = random_logits(1, 2, 12)
    asking = started({0: Row(SamplingParams(logprobs=1000), 0, [1], 1)}, 12).sample(logits, [0])
    assert asking.logprobs is not None
    assert asking.logprobs[0] is not None
    assert sorted(asking.logprobs[0].top_ids) == list(range(12))
    assert started({0: Row(SamplingParams(), 0, [1], 1)}, 12).sample(logits, [0]).logprobs is None


# ---------------------------------------------------------------- the ends of the ranges


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=100, top_k=1),
        SamplingParams(temperature=100, top_p=1e-300),
        SamplingParams(temperature=1e-4, min_p=1.0, top_p=0.5, top_k=VOCAB + 1),
        SamplingParams(temperature=1, min_p=1.0),
        SamplingParams(temperature=0, top_p=0.1, repetition_penalty=1e-300),
    ],
    ids=changed_settings,
)
def test_settings_that_leave_one_token_choose_the_most_probable(params: SamplingParams) -> None:
    logits = random_logits(32, 9)
    sampler = started({s: Row(params, s, [int(logits[s].argmax())], 1) for s in range(32)})
    assert torch.equal(sampler.sample(logits, range(32)).token_ids, logits.argmax(-1))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)])
def test_of_equal_tokens_the_lowest_id_is_the_most_probable(params: SamplingParams) -> None:
    logits = torch.zeros(8, VOCAB)
    logits[:, [2999, 40, 1700]] = 1.0
    sampler = started({s: Row(params, s, [0], 1) for s in range(8)})
    assert sampler.sample(logits, range(8)).token_ids.tolist() == [40] * 8


def test_a_hot_temperature_reaches_the_whole_vocabulary() -> None:
    vocab = 64
    logits = random_logits(1, 4, vocab)
    for params in (SamplingParams(temperature=100), SamplingParams(temperature=100, top_k=vocab + 1)):
        sampler = started({s: Row(params, s, [1], 1) for s in range(64)}, vocab)
        seen = set()
        for _ in range(30):
            seen |= set(sampler.sample(logits.expand(64, vocab), range(64)).token_ids.tolist())
        assert len(seen) == vocab


def test_an_empty_batch_gives_no_tokens() -> None:
    result = started({}).sample(torch.zeros(0, VOCAB), [])
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None
