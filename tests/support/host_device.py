"""A stand-in for the GPU that computes at once on the CPU: what is above `engine.cuda.device` runs on it unchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class HostEvent:
    """Everything has always happened already; unless it is held back.

    Attributes:
        num_waits: how often work was made to wait for it.
    """

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self.num_waits = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return not self._device.holds_copies

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        self.num_waits += 1


class HostGraph:
    """Runs again what was captured, and leaves the result where the first run left it."""

    def __init__(self, run: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        self._run = run
        self._result = result

    def replay(self) -> None:
        self._result.copy_(self._run())


class HostDevice:
    """See `Device`.

    Attributes:
        holds_copies: events say that they have not passed, so that loads stay under way.
        num_captures: graphs captured.   num_reclaims: times that memory was given back.
        kept: tensors that a capture, which here has to compute, leaves as they were.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.holds_copies = False
        self.num_captures = self.num_reclaims = 0
        self.kept: list[torch.Tensor] = []

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> HostEvent:
        return HostEvent(self)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[HostGraph, torch.Tensor]:
        """The result means nothing before the first replay, as on a GPU."""
        self.num_captures += 1
        before = [tensor.clone() for tensor in self.kept]
        result = torch.full_like(run(), -1)
        for tensor, value in zip(self.kept, before, strict=True):
            tensor.copy_(value)
        return HostGraph(run, result), result

    def reclaim(self) -> None:
        self.num_reclaims += 1

    def synchronize(self) -> None:
        pass
