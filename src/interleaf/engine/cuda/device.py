"""Streams, events, pinned memory and graphs, as far as a step needs them. Knows no step.

`CudaDevice` is the GPU. Tests have another that computes at once on the CPU, so that everything above it runs anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, cast

import torch

_LEFT_BYTES, _MOST_LEFT_BYTES = 2**28, 2**32
"""Of the device's memory, that graphs leave alone; twice as much whenever that was not enough, up to the second."""
_CUDA_OUT_OF_MEMORY = 2


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Set the point: after everything that has been enqueued on the current stream."""

    def query(self) -> bool:
        """Whether the work before the point is done."""

    def synchronize(self) -> None:
        """Wait until it is."""

    def wait(self) -> None:
        """What is enqueued on the current stream from now on begins after the point."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Enqueue it again."""


class Device(Protocol):
    """One accelerator, with a stream that computes and one that copies adapters."""

    torch_device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the compute stream."""

    def copying(self) -> AbstractContextManager[object]:
        """Inside, work is enqueued on the copy stream."""

    def event(self) -> Event:
        """A new event."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that copies of their own accord: [num_bytes] uint8."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `run` enqueues, without doing it.

        Returns: the graph, and where each replay leaves the result.
        Raises: OutOfMemoryError: little is left, and steps that are launched kernel by kernel may need it.
        """

    def reclaim(self) -> None:
        """Give back memory that nothing refers to, that of graphs included, and leave more of it free from now on."""

    def synchronize(self) -> None:
        """Wait for everything."""


class CudaDevice:
    """A CUDA GPU. All graphs share one memory pool: they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        torch.cuda.set_device(device)
        self._compute = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capture = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph_memory: Any = None  # made with the first graph
        self._anchor: torch.cuda.CUDAGraph | None = None  # a graph that stays, and its result
        self._anchored: torch.Tensor | None = None
        self._left_bytes = _LEFT_BYTES

    def computing(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(self._compute))

    def copying(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(self._copy))

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        if torch.cuda.mem_get_info(self.torch_device)[0] < self._left_bytes:
            raise torch.OutOfMemoryError(f"under {self._left_bytes} bytes are free")
        if self._anchor is None:
            # torch takes no graph into memory of graphs that have all gone, nor into that of one whose capture failed.
            self._graph_memory = torch.cuda.graph_pool_handle()
            self._anchor, self._anchored = self._captured(lambda: torch.zeros(1, device=self.torch_device))
        graph, result = self._captured(run)
        return cast(Graph, graph), result

    def _captured(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # torch.cuda.graph would wait for the device and empty its caches first, which costs a running server steps.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture), _no_collection():
            # Other threads may register slabs meanwhile: only this thread's calls are held to the rules of a capture.
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                # What is told is what broke the capture, not that it is broken.
                with suppress(RuntimeError):
                    self._end(graph)
                raise
            self._end(graph)
        return graph, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. If that fails, torch has not stopped taking memory for it; what others have stays theirs."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_memory)
            self._anchor = self._anchored = None
            if getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def reclaim(self) -> None:
        self._anchor = self._anchored = None  # their memory goes with the last graph that refers to it
        self._left_bytes = min(2 * self._left_bytes, _MOST_LEFT_BYTES)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: memory that the driver is told to let go of would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
