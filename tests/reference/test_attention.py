"""Attention over scattered pages against a float64 loop over each sequence's own history."""

import numpy as np
import pytest
import torch

from interleaf.attention import AttentionRows, ChunkRows, TorchSdpa
from interleaf.attention.torch_sdpa import _buckets
from interleaf.kernels.rotary import RopeAngles
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.page_table import PageTable
from interleaf.memory.pool import PagePool

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 16


def angles_of(positions, dtype):
    """Rotations by radians that differ from pair to pair; cosine and sine rounded to the dtype."""
    radians = torch.tensor(positions).double()[:, None, None] * torch.linspace(1, 0.1, HEAD_DIM // 2).double()
    return RopeAngles(radians.cos().repeat(1, 1, 2).to(dtype), radians.sin().to(dtype))


def turned(x, angles):
    """The heads of x as complex numbers, element i with element i + HEAD_DIM / 2, times the rotations; float64."""
    pairs = torch.complex(*x.double().unflatten(-1, (2, -1)).unbind(-2))
    product = pairs * torch.complex(angles.cos[..., : HEAD_DIM // 2].double(), angles.sin.double())
    return torch.cat([product.real, product.imag], dim=-1)


class Sequences:
    """Random sequences in a pool, and the same keys and values kept apart for the oracle."""

    def __init__(self, num_seats, page_tokens, window=None, fill=float("nan"), num_pages=700, dtype=torch.float32):
        self.page_tokens, self.window = page_tokens, window
        geometry = PageGeometry(page_tokens, LAYERS, KV_HEADS, HEAD_DIM, dtype.itemsize)
        self.pool = PagePool(geometry, num_pages, dtype)
        self.pool.data.fill_(fill)
        self.attention = TorchSdpa(self.pool, window)
        self.table = PageTable(num_seats, page_tokens)
        self.random = torch.Generator().manual_seed(11)
        self.free = torch.randperm(num_pages, generator=self.random).tolist()
        self.history = [[([], []) for _ in range(LAYERS)] for _ in range(num_seats)]
        for seat in range(num_seats):
            self.table.start(seat, (self.free.pop(),))

    def step(self, decode, chunks=()):
        """Run one step of random q, k, v. Returns: per layer (what attention said, what the oracle says)."""
        rows = [(seat, int(self.table.lengths[seat])) for seat in decode]
        rows += [(seat, int(self.table.lengths[seat]) + i) for seat, count in chunks for i in range(count)]
        for seat, position in rows:
            if position // self.page_tokens >= self.table.num_pages[seat]:
                self.table.grow(seat, (self.free.pop(),))
        runs = tuple(ChunkRows(seat, int(self.table.lengths[seat]), count) for seat, count in chunks)
        step = self.attention.prepare(AttentionRows(self.table, np.array(decode, dtype=np.int64), runs))
        answers = []
        for layer in range(LAYERS):
            qkv = torch.randn(len(rows), HEADS + 2 * KV_HEADS, HEAD_DIM, generator=self.random)
            qkv = qkv.to(self.pool.data.dtype)
            angles = angles_of([position for _, position in rows], qkv.dtype)
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            expected = self.expected(layer, rows, turned(q, angles), turned(k, angles), v)
            answers.append((step.forward(layer, qkv, angles), expected))
        for seat, _ in rows:
            self.table.lengths[seat] += 1
        return answers

    def expected(self, layer, rows, q, k, v):
        out = torch.empty(len(rows), HEADS, HEAD_DIM, dtype=torch.float64)
        for row, (seat, position) in enumerate(rows):
            keys, values = self.history[seat][layer]
            assert len(keys) == position
            keys.append(k[row].double())
            values.append(v[row].double())
            first = 0 if self.window is None else max(0, position + 1 - self.window)
            past_keys, past_values = torch.stack(keys[first:]), torch.stack(values[first:])
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights = (past_keys[:, kv] @ q[row, head].double() / HEAD_DIM**0.5).softmax(0)
                out[row, head] = weights @ past_values[:, kv]
        return out.flatten(1)


def check(answers, atol=2e-6):
    for found, expected in answers:
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_chunks_and_decode_rows_of_one_batch_see_their_own_past_only(page_tokens, window):
    sequences = Sequences(5, page_tokens, window)
    check(sequences.step([], [(0, 7), (1, 1), (3, 16)]))
    check(sequences.step([0, 1], [(2, 5), (3, 3), (4, 4)]))
    check(sequences.step([0, 1, 2, 3, 4]))
    check(sequences.step([2, 4], [(0, 9), (1, 2)]))
    check(sequences.step([4, 1, 3]))


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_chunks_with_the_same_bounds_are_computed_together_and_stay_apart(page_tokens):
    sequences = Sequences(4, page_tokens)
    check(sequences.step([], [(0, 6), (1, 6), (2, 6), (3, 2)]))
    check(sequences.step([3], [(0, 4), (2, 4), (1, 3)]))


def test_decode_rows_of_very_different_lengths_are_right():
    sequences = Sequences(4, 4, num_pages=200)
    check(sequences.step([], [(1, 290), (3, 140)]))
    check(sequences.step([1], [(0, 3), (2, 129)]))
    check(sequences.step([0, 1, 2, 3]))
    check(sequences.step([0, 1, 2, 3]))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_what_pages_held_before_changes_no_bit(page_tokens, window):
    answers = []
    for fill in (0.0, float("nan"), float("inf")):
        sequences = Sequences(3, page_tokens, window, fill)
        steps = [sequences.step([], [(0, 21), (1, 2)]), sequences.step([0, 1], [(2, 5)]), sequences.step([0, 1, 2])]
        answers.append(torch.cat([found for step in steps for found, _ in step]))
    assert answers[0].isfinite().all()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_sequence_of_nan_leaves_its_neighbours_alone():
    clean, dirty = Sequences(3, 4), Sequences(3, 4)
    for sequences in (clean, dirty):
        sequences.step([], [(0, 9), (1, 1), (2, 5)])
    dirty.pool.data[dirty.table.pages[1, 0]] = torch.nan
    for (expected, _), (found, _) in zip(clean.step([0, 1, 2]), dirty.step([0, 1, 2]), strict=True):
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_16_bit_pools_are_close(dtype, atol):
    sequences = Sequences(3, 4, dtype=dtype)
    check(sequences.step([], [(0, 9), (1, 17)]), atol)
    check(sequences.step([0, 1], [(2, 5)]), atol)


def test_a_step_keeps_its_tables_when_they_change_after_it_was_prepared():
    sequences = Sequences(2, 4)
    sequences.step([], [(0, 6), (1, 3)])
    seats = np.array([0, 1])
    sequences.table.grow(0, (sequences.free.pop(),))
    step = sequences.attention.prepare(AttentionRows(sequences.table, seats))
    again = sequences.attention.prepare(AttentionRows(sequences.table, seats))
    qkv = torch.randn(2, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=sequences.random)
    angles = angles_of([6, 3], qkv.dtype)
    expected = step.forward(0, qkv.clone(), angles)
    sequences.table.vacate(0)
    sequences.table.start(0, (sequences.free.pop(),))
    sequences.table.advance(seats, 1)
    assert torch.equal(again.forward(0, qkv.clone(), angles), expected)


def test_buckets_pad_no_long_row_to_more_than_twice_its_length():
    lengths = np.array([3, 1000, 400, 501, 120, 128, 399, 2])
    buckets = _buckets(lengths)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(8))
    for bucket in buckets:
        assert bucket.tolist() == sorted(bucket.tolist())
        longest = lengths[bucket].max()
        assert longest <= 128 or (2 * lengths[bucket] >= longest).all()
    assert [b.tolist() for b in _buckets(np.array([100, 1, 90]))] == [[0, 1, 2]]
    assert _buckets(np.array([], dtype=np.int64)) == []
