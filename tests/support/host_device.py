"""A stand-in for the GPU that computes at once on the CPU: what is above `engine.cuda.device` runs on it unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class HostEvent:
    """Everything has always happened already; unless it is held back.

    Attributes:
        is_copys: it was recorded on the copy stream.
        num_waits: how often work was made to wait for it.
    """

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self.num_waits = 0
        self.is_copys = False

    def record(self) -> None:
        self.is_copys = self._device.is_copying

    def query(self) -> bool:
        return not (self._device.holds_copies if self.is_copys else self._device.holds_steps)

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
        holds_copies, holds_steps: events on the copy stream, or on the other, say that they have not passed.
        is_copying: the copy stream is the current one.
        num_captures: graphs captured.   num_reclaims: times that memory was given back.
        kept: tensors that a capture, which here has to compute, leaves as they were.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.holds_copies = self.holds_steps = self.is_copying = False
        self.num_captures = self.num_reclaims = 0
        self.kept: list[torch.Tensor] = []

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.is_copying = True
        try:
            yield
        finally:
            self.is_copying = False

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
