"""Attention by FlashInfer against float64 loops: its kernels on a CUDA device, or a fake of them on the CPU.

tests/reference/test_triton_small.py runs this file under Triton's interpreter in a process of its own.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from interleaf.kernels import flashinfer_jit
from interleaf.kernels.rotary import RopeAngles

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import DEVICE, IS_INTERPRETED, ON_GPU  # noqa: E402

if not (IS_INTERPRETED or (ON_GPU and find_spec("flashinfer"))):
    pytest.skip("needs a CUDA device and FlashInfer, or TRITON_INTERPRET=1", allow_module_level=True)

from interleaf.attention import flashinfer, flashinfer_plans  # noqa: E402
from interleaf.attention.flashinfer import FlashInferPaged  # noqa: E402
from interleaf.errors import ConfigError  # noqa: E402
from tests.support.device_sequences import LAYER, DeviceSequences, Heads  # noqa: E402
from tests.support.fake_flashinfer import FakeFa2  # noqa: E402
from tests.support.static_rows import StaticRows  # noqa: E402

EVERY_MODULE = os.environ.get("INTERLEAF_TEST_EVERY_MODULE") == "1"
"""Each dtype and each size of heads, with a window and without, is a module of its own: a minute of compilation."""
DTYPES = [torch.bfloat16] * ON_GPU + [torch.float16] * (EVERY_MODULE or not ON_GPU)
DTYPE, DIM = DTYPES[0], 128 if ON_GPU else 64
MULTIPROCESSORS = 4
"""Of the fake: 8 programs, so that with 2 KV heads up to 4 decode rows may be split."""
HAS_WINDOWS = EVERY_MODULE or not ON_GPU or flashinfer_jit._attention_spec(DTYPE, DIM, True).is_compiled
needs_windows = pytest.mark.skipif(not HAS_WINDOWS, reason="not compiled: INTERLEAF_TEST_EVERY_MODULE=1 compiles it")
WINDOWS = [None, *(pytest.param(w, marks=needs_windows) for w in ([1, 5, 70] if ON_GPU else [5]))]
MANY = 300 if ON_GPU else 6
"""Decode rows that are more than programs."""
GROUPS = [(2, 2), (3, 1), (8, 2), (7, 1), (20, 1)] if ON_GPU else [(2, 2), (3, 1)]


@pytest.fixture(autouse=True)
def fa2(monkeypatch):
    """The fake; None on a GPU."""
    if ON_GPU:
        return None
    fake = FakeFa2(MULTIPROCESSORS)
    monkeypatch.setattr(flashinfer_jit, "attention", lambda *_: fake)
    monkeypatch.setattr(flashinfer_plans, "send", fake.send)
    monkeypatch.setattr(flashinfer, "_multiprocessors", lambda _: MULTIPROCESSORS)
    return fake


def make(pool, num_heads, window):
    return FlashInferPaged(pool, num_heads, window=window, max_seqs=512)


def sequences(heads=Heads(4, 2, DIM), page_tokens=4, dtype=DTYPE, **settings):  # noqa: B008
    return DeviceSequences(make, heads, page_tokens, dtype, **settings)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("page_tokens", [1, 4, 16] if ON_GPU else [4])
def test_chunks_and_decode_rows_of_one_batch_see_their_own_past_only(page_tokens, window, dtype):
    them = sequences(page_tokens=page_tokens, dtype=dtype, window=window, num_pages=200 if page_tokens > 1 else 400)
    them.check([], [(0, 7), (1, 1), (3, 20)])
    them.check([0, 1], [(2, 5), (3, 9), (4, 4)])
    them.check([0, 1, 2, 3, 4])
    them.check([2, 4], [(0, 9), (1, 2)])
    them.check([4, 1, 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(q, kv, DIM) for q, kv in GROUPS], ids=str)
def test_any_number_of_query_heads_shares_a_kv_head(heads, dtype):
    them = sequences(heads, dtype=dtype)
    them.check([], [(0, 19), (1, 3)])
    them.check([0], [(2, 6), (1, 13)])
    them.check([2, 1, 0])


@pytest.mark.parametrize("dim", flashinfer_jit.HEAD_DIMS if EVERY_MODULE else [DIM])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_long_sequences_beside_short_ones(page_tokens, dim):
    them = sequences(Heads(4, 2, dim), page_tokens=page_tokens, num_pages=900)
    for seat, count in enumerate((120, 3, 33, 64)):
        them.fill(seat, count)
    them.check([0, 1, 2, 3])
    them.check([2, 0], [(1, 5)])


class GraphOf:
    """Decode steps of one number of rows: captured and replayed on a GPU, run again from the same tensors without."""

    def __init__(self, them, capacity):
        self.them, self.capacity, self.static = them, capacity, StaticRows()
        self.graph = None

    def check(self, decode):
        them, padding = self.them, self.capacity - len(decode)
        new = them.rows(decode, padding=padding)
        qkv, angles = them.inputs(new)
        rows = self.static.take(new)
        step = them.attention.prepare_graph(rows)
        if self.graph is None:
            self.step, self.qkv = step, qkv.to(DEVICE)
            self.angles = RopeAngles(angles.cos.to(DEVICE), angles.sin.to(DEVICE))
            self.out = step.forward(LAYER, self.qkv, self.angles)
            self.graph = self._capture()
        else:
            assert step is self.step
            for static, value in ((self.qkv, qkv), (self.angles.cos, angles.cos), (self.angles.sin, angles.sin)):
                static.copy_(value)
            self.graph()
        them.compare(self.out[: len(decode)].cpu(), them.expected(new, qkv, angles))

    def _capture(self):
        def run():
            self.out.copy_(self.step.forward(LAYER, self.qkv, self.angles))

        if not ON_GPU:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=needs_windows)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graphs_of_few_and_of_many_rows_follow_lengths_that_change_by_turns(dtype, window):
    them = sequences(page_tokens=4, dtype=dtype, window=window, num_seats=MANY, num_pages=8 * MANY + 300)
    few, many = GraphOf(them, 4), GraphOf(them, MANY)
    them.fill(0, 33)
    every = list(range(MANY))
    few.check([0, 1])
    many.check(every)
    them.fill(1, 21)
    them.fill(3, 400 if ON_GPU else 30)
    few.check([1, 3, 0])
    them.check([2, 0], [(4, 9), (1, 2)])
    few.check([3])
    many.check(every[1:])
    few.check([4, 3, 2, 1])
    many.check(every[:3])


def test_graphs_of_many_rows_are_planned_once_and_of_few_before_every_step(fa2):
    if fa2 is None:
        pytest.skip("looks into the fake")
    them = sequences(num_seats=8)
    few, many = GraphOf(them, 4), GraphOf(them, 5)
    for _ in range(3):
        few.check([0, 1])
        many.check([2, 3, 4, 5, 6])
    assert [(p["seqs"], p["graph"], p["split"]) for p in fa2.plans] == [
        (4, True, True),
        (5, False, False),
        (4, True, True),
        (4, True, True),
    ]


# Microseconds of a layer of attention of an 8B model on an H200, split and not: docs/benchmarks/h200/engine.md.
MEASURED_CHUNKS = [
    (216, 216, 31.2, 17.6),
    (400, 400, 52.7, 26.5),
    (512, 512, 62.2, 30.4),
    (64, 512, 18.5, 29.2),
    (64, 1024, 19.0, 52.9),
    (256, 1024, 41.1, 53.8),
    (512, 1024, 74.2, 54.1),
    (16, 2048, 13.1, 45.0),
    (64, 2048, 20.4, 100.2),
    (512, 2048, 98.4, 101.3),
    (16, 4096, 15.5, 85.8),
    (64, 4096, 26.5, 193.0),
    (512, 4096, 146.2, 196.1),
]


@pytest.mark.parametrize(("num_rows", "longest", "split_us", "unsplit_us"), MEASURED_CHUNKS)
def test_chunks_are_split_where_that_was_faster(num_rows, longest, split_us, unsplit_us):
    assert flashinfer._chunks_pay_a_split(longest, num_rows, -1) == (split_us < unsplit_us)
    seen = longest - num_rows
    assert flashinfer._chunks_pay_a_split(10**6, num_rows, seen) == (split_us < unsplit_us), "a window hides the rest"
    assert flashinfer._chunks_pay_a_split(longest, num_rows, 10**6) == (split_us < unsplit_us), "or nothing"


@needs_windows
def test_whether_chunks_are_split_is_asked_of_all_their_rows_and_the_window(monkeypatch):
    asked = []
    pays = flashinfer._chunks_pay_a_split
    monkeypatch.setattr(flashinfer, "_chunks_pay_a_split", lambda *given: asked.append(given) or pays(*given))
    for window, left in ((5, 4), (None, -1)):
        them = sequences(num_seats=8, window=window)
        them.fill(0, 40)
        them.fill(3, 9)
        them.check([0], [(2, 3), (3, 20)])
        assert asked.pop() == (29, 23, left)


@pytest.mark.parametrize("longest", [0, 21, 10**9])
def test_chunks_are_split_where_a_sequence_is_long(fa2, monkeypatch, longest):
    monkeypatch.setattr(flashinfer, "_UNSPLIT_TOKENS", longest)
    monkeypatch.setattr(flashinfer, "_UNSPLIT_TOKENS_PER_ROW", 0)
    them = sequences(num_seats=8)
    them.fill(0, 40)
    for decode, chunks, tokens in (
        ([], [(1, 21)], 21),
        ([0], [(2, 3), (3, 20)], 20),
        ([1, 2], [(4, 5), (3, 2)], 22),
        ([], [(0, 9)], 50),
    ):
        them.check(decode, chunks)
        if fa2 is not None:
            assert [p["split"] for p in fa2.plans if p["causal"]] == [tokens > longest]
            fa2.plans.clear()


def test_a_step_may_be_planned_while_the_one_before_waits_for_the_device():
    """Plans leave pinned memory when the device comes to it: the next one must not be written over them."""
    them = sequences()
    steps = []
    for decode, chunks in (([0, 1], [(2, 5)]), ([2, 0, 1], [(3, 4)])):
        rows = them.rows(decode, chunks)
        qkv, angles = them.inputs(rows)
        steps.append((them.attention.prepare(rows), qkv, angles, them.expected(rows, qkv, angles)))
    for step, qkv, angles, expected in steps:
        out = step.forward(LAYER, qkv.to(DEVICE), RopeAngles(angles.cos.to(DEVICE), angles.sin.to(DEVICE)))
        if not ON_GPU:  # on a device the second step's plan has taken the first one's place by now
            them.compare(out.cpu(), expected)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_what_pages_held_before_changes_nothing(fill):
    them = sequences(page_tokens=16, window=9 if HAS_WINDOWS else None)
    them.pool.data.fill_(fill)
    them.check([], [(0, 21), (1, 2)])
    them.check([0, 1], [(2, 5)])
    them.check([0, 1, 2])


def test_what_flashinfer_does_not_compute_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"float16 and bfloat16.*not torch\.float32"):
        sequences(dtype=torch.float32)
    with pytest.raises(ConfigError, match="and 80"):
        sequences(Heads(4, 2, 80))
