"""The ring that arrays are sent from: with a device that reads what was sent when it comes to it, and no sooner."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from interleaf.engine.cuda.device import Device
from interleaf.engine.cuda.staging import Staging
from interleaf.kernels import uploads
from interleaf.kernels.uploads import Uploads


class LateDevice:
    """Work in its order, done when `run` says so."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.num_waits = 0

    def send(self, host: torch.Tensor, target: torch.Tensor) -> None:
        self.work.append(lambda: target.copy_(host))

    def run(self, count: int | None = None) -> None:
        """Do so many things, or all."""
        for _ in range(len(self.work) if count is None else count):
            self.work.pop(0)()

    def event(self) -> LateEvent:
        return LateEvent(self)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._recorded = self._passed = 0

    def record(self) -> None:
        self._recorded += 1
        number = self._recorded
        self._device.work.append(lambda: setattr(self, "_passed", number))

    def query(self) -> bool:
        return self._passed == self._recorded

    def synchronize(self) -> None:
        self._device.num_waits += not self.query()
        while not self.query():
            self._device.run(1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(uploads, "send", device.send)
    monkeypatch.setattr("interleaf.engine.cuda.staging.send", device.send)
    return device


@pytest.mark.parametrize("block_bytes", [4, 20, 64, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_arrays_that_change_once_they_are_sent_arrive_as_they_were(
    device: LateDevice, block_bytes: int, seed: int
) -> None:
    chance = random.Random(seed)
    ring = Uploads(torch.device("cpu"), block_bytes, new_event=device.event)
    sent: list[tuple[np.ndarray, torch.Tensor]] = []
    for _ in range(200):
        dtype = chance.choice([np.int16, np.int32, np.int64, np.float32, np.uint8])
        values = np.array([chance.randrange(100) for _ in range(chance.randrange(40))], dtype=dtype)
        target = torch.full((len(values),), -1, dtype=torch.int32)
        if dtype is np.int32 and chance.random() < 0.5:
            ring.send(values, target)
        else:
            target = ring.new(values)
        sent.append((values.copy(), target))
        values[:] = 111
        device.run(chance.randrange(len(device.work) + 1))
    assert device.num_waits == 0
    device.run()
    for values, target in sent:
        assert np.array_equal(target.numpy(), values)


def test_the_ring_grows_to_what_is_on_its_way_and_no_further(device: LateDevice) -> None:
    ring = Uploads(torch.device("cpu"), 100, new_event=device.event)
    for _ in range(50):  # steps, of which one is computed while the next one's arrays are sent
        behind = len(device.work)
        ring.new(np.zeros(500, dtype=np.uint8))
        device.run(behind)
    assert 1000 <= ring.num_bytes <= 1200
    assert Uploads(torch.device("cpu"), 100).num_bytes == 200


def test_where_arrays_are_read_at_once_two_blocks_do() -> None:
    ring = Uploads(torch.device("cpu"), 8)
    for i in range(20):
        assert ring.new(np.full(5, i)).tolist() == [i] * 5
    assert ring.num_bytes == 16


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_values_of_another_type_than_the_target_s_are_not_sent(dtype: type) -> None:
    with pytest.raises(AssertionError, match=r"int64|float32"):
        Uploads(torch.device("cpu")).send(np.zeros(4, dtype=dtype), torch.zeros(4, dtype=torch.int32))


def test_a_step_s_arrays_are_written_where_those_of_two_steps_ago_have_been_read(device: LateDevice) -> None:
    on_device: Device = device  # type: ignore[assignment]
    staging = Staging(on_device, 100)
    seen = []
    for step in range(6):
        staging.begin()
        target = staging.put(np.full(5, step), torch.int64)
        odd = staging.put(np.full(3, step), torch.uint8)
        staging.send()
        device.work.append(lambda target=target, odd=odd: seen.append((target.tolist(), odd.tolist())))  # type: ignore[misc]
    device.run()
    assert seen == [([step] * 5, [step] * 3) for step in range(6)]
    assert device.num_waits == 4, "of six steps, the last four found theirs in use"
