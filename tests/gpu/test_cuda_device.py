"""Captures one after another, whatever became of those before. On a CUDA device."""

import gc

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from interleaf.engine.cuda.device import CudaDevice  # noqa: E402


@pytest.fixture
def device():
    device = CudaDevice(torch.device("cuda", 0))
    with torch.inference_mode(), device.computing():
        yield device
        device.synchronize()


def doubles(x):
    return lambda: x * 2 + x.sum()


def check(captured, x):
    graph, result = captured
    x.copy_(torch.arange(len(x)))
    graph.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [2 * i + sum(range(len(x))) for i in range(len(x))]


@pytest.fixture
def x(device):
    x = torch.zeros(1000, device="cuda")
    doubles(x)()  # what a capture launches has been compiled and loaded
    return x


def test_a_graph_may_be_captured_when_all_others_have_gone(device, x):
    for _ in range(5):
        check(device.capture(doubles(x)), x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("a fault of the model's")])
@pytest.mark.parametrize("kept", [False, True])
def test_a_capture_that_fails_leaves_the_next_ones_alone(device, x, error, kept):
    others = [device.capture(doubles(x))] if kept else []

    def fails():
        doubles(x)()
        raise error

    for _ in range(3):
        with pytest.raises(type(error)):
            device.capture(fails)
        check(device.capture(doubles(x)), x)
    for other in others:
        check(other, x)


def too_much():
    return torch.empty(2**46, dtype=torch.uint8, device="cuda")


def a_wait():
    torch.cuda.synchronize()  # which no capture may hold
    return torch.zeros(1, device="cuda")


@pytest.mark.parametrize("broken", [too_much, a_wait])
@pytest.mark.parametrize("kept", [False, True])
def test_so_does_one_that_cuda_breaks(device, x, broken, kept):
    others = [device.capture(doubles(x))] if kept else []
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"out of memory|captur"):
            device.capture(lambda: doubles(x)() + broken())  # torch warns of graphs without work
        check(device.capture(doubles(x)), x)
    for other in others:
        check(other, x)


def test_memory_that_is_short_when_a_capture_ends_is_told_as_that(device, x, monkeypatch):
    class OutOfMemory(RuntimeError):
        error_code = 2

    end = torch.cuda.CUDAGraph.capture_end

    def ends_short(graph):
        end(graph)
        raise OutOfMemory("CUDA error: out of memory")

    check(device.capture(doubles(x)), x)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.CUDAGraph, "capture_end", ends_short)
        with pytest.raises(torch.OutOfMemoryError):
            device.capture(doubles(x))
    check(device.capture(doubles(x)), x)


def test_garbage_is_not_collected_within_a_capture_and_is_again_after_it(device, x):
    seen = []

    def run():
        seen.append(gc.isenabled())
        return doubles(x)()

    for enabled in (True, False, True):
        (gc.enable if enabled else gc.disable)()
        check(device.capture(run), x)
        assert gc.isenabled() is enabled
    assert not any(seen)


def test_graphs_are_captured_after_memory_was_given_back(device, x):
    for _ in range(3):
        captured = device.capture(doubles(x))
        check(captured, x)
        device.reclaim()
        check(captured, x)  # whoever keeps one keeps its memory
