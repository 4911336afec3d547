"""Small arrays on their way to a GPU: all of them arrive as they were, and none waits for copies of other streams.

tests/reference/test_triton_small.py runs this file under Triton's interpreter in a process of its own.
"""

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import DEVICE, IS_INTERPRETED, ON_GPU  # noqa: E402

if not (ON_GPU or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from interleaf.kernels.pull import pull  # noqa: E402
from interleaf.kernels.uploads import Uploads, send  # noqa: E402

TYPES = [np.int16, np.int32, np.int64, np.float32, np.uint8]


@pytest.mark.parametrize("count", [1, 2, 3, 1024, 1025, 5000])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_the_kernel_copies_so_many_words_and_writes_no_other(first, count):
    host = torch.arange(6000, dtype=torch.int32, pin_memory=ON_GPU)
    target = torch.full((6000,), -1, dtype=torch.int32, device=DEVICE)
    pull[(-(-count // 1024),)](host[first:], target[2 * first :], count, BLOCK=1024, num_warps=4)
    expected = torch.full((6000,), -1, dtype=torch.int32)
    expected[2 * first : 2 * first + count] = host[first : first + count]
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (3,), (2, 5), (7, 11), (513,)], ids=str)
def test_a_new_tensor_has_the_values_shape_and_type(shape, dtype):
    values = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    for array in (values, np.asfortranarray(values), np.repeat(values, 2, 0)[::2]):
        made = Uploads(DEVICE, 64).new(array)
        assert made.device.type == DEVICE.type
        assert made.dtype == torch.from_numpy(values).dtype
        assert np.array_equal(made.cpu().numpy(), values)


@pytest.mark.parametrize("num_bytes", [8, 40, 1000, 4096])
def test_arrays_that_change_once_they_are_sent_arrive_as_they_were(num_bytes):
    chance = random.Random(num_bytes)
    uploads = Uploads(DEVICE, num_bytes)
    expected, found, places = [], [], torch.zeros(60, 8, dtype=torch.int32, device=DEVICE)
    if ON_GPU:
        torch.cuda._sleep(10_000_000)  # whatever is sent is read later, while the ring has room
    for i in range(60):
        values = np.full(chance.randrange(1, 300), i, dtype=chance.choice(TYPES))
        expected.append(values.copy())
        found.append(uploads.new(values))
        values[:] = 77
        row = np.full(8, i, dtype=np.int32)
        uploads.send(row, places[i])
        row[:] = 77
    for values, tensor in zip(expected, found, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), values)
    assert torch.equal(places.cpu(), torch.arange(60, dtype=torch.int32)[:, None].expand(60, 8))


def test_what_does_not_fit_its_place_is_not_sent():
    with pytest.raises(AssertionError, match="3 values for 4 places"):
        Uploads(DEVICE).send(np.zeros(3, dtype=np.int32), torch.zeros(4, dtype=torch.int32, device=DEVICE))


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no copy engine")
def test_what_is_sent_arrives_while_copies_of_another_stream_are_under_way():
    large = torch.ones(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    small, target = torch.arange(64, pin_memory=True), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    send(small, target)  # compiles
    torch.cuda.synchronize()
    copied, sent, stream = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(8):  # 160 ms at the speed of the link
            there.copy_(large, non_blocking=True)
        copied.record()
    small += 1
    send(small, target)
    sent.record()
    sent.synchronize()
    assert not copied.query(), "it waited for every copy"
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), small)
