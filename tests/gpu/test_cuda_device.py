"""Captures one after another, whatever became of those before. On a CUDA device."""

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


def test_graphs_are_captured_after_memory_was_given_back(device, x):
    for _ in range(3):
        captured = device.capture(doubles(x))
        check(captured, x)
        device.reclaim()
        check(captured, x)  # whoever keeps one keeps its memory
