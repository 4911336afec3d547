"""How long a step takes. Knows sizes of work and rates; not who asked for it, and no clock.

Two models: `Roofline` says what a device's rates allow, `Linear` says what an engine was measured to do (`fit`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from interleaf.errors import ConfigError
from interleaf.sim.hardware import Gpu
from interleaf.sim.shapes import ModelShape


@dataclass(slots=True)
class StepWork:
    """What one step computes.

    Attributes:
        decode_rows: sequences that compute one token.
        chunk_tokens: prompt tokens.
        context_tokens: tokens of KV read: of each decoding sequence and of each chunk all that it has, itself included.
        adapter_bytes: weights of the distinct adapters of the step.
    """

    decode_rows: int
    chunk_tokens: int
    context_tokens: int
    adapter_bytes: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.chunk_tokens


class CostModel(Protocol):
    """Seconds of a step."""

    def step_s(self, work: StepWork) -> float:
        """How long the device is busy; a step without rows takes no time."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The longer of reading and computing, and a constant: overhead + max(bytes / bandwidth, FLOPs / peak).

    Bytes are the base weights once, the KV of every context and each distinct adapter once. It is a bound: no gaps
    between kernels but the constant, perfect overlap of reading and computing.
    """

    overhead_s: float
    bandwidth_bytes_s: float
    flops_s: float
    read_bytes: int
    token_bytes: int
    flops_per_row: float

    def step_s(self, work: StepWork) -> float:
        if not work.rows:
            return 0.0
        num_bytes = self.read_bytes + work.context_tokens * self.token_bytes + work.adapter_bytes
        flops = work.rows * self.flops_per_row
        return self.overhead_s + max(num_bytes / self.bandwidth_bytes_s, flops / self.flops_s)


@dataclass(frozen=True, slots=True)
class Linear:
    """A sum of rates, as least squares finds them in a record of steps."""

    overhead_s: float
    decode_row_s: float
    chunk_token_s: float
    context_token_s: float
    adapter_byte_s: float

    def step_s(self, work: StepWork) -> float:
        if not work.rows:
            return 0.0
        return (
            self.overhead_s
            + work.decode_rows * self.decode_row_s
            + work.chunk_tokens * self.chunk_token_s
            + work.context_tokens * self.context_token_s
            + work.adapter_bytes * self.adapter_byte_s
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Linear:
        """Raises: ConfigError: the file does not hold the five coefficients."""
        try:
            return cls(**{key: float(value) for key, value in json.loads(path.read_text("utf-8")).items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a file that `fit` has saved: {error}") from error


DEFAULT_OVERHEAD_S = 1e-3
"""Gaps between launches and whatever the host does not hide: a guess of the right size. `fit` replaces it."""


def roofline(gpu: Gpu, shape: ModelShape, overhead_s: float = DEFAULT_OVERHEAD_S) -> Roofline:
    """What one GPU allows for one rank's share of a model."""
    return Roofline(
        overhead_s=overhead_s,
        bandwidth_bytes_s=gpu.bandwidth_bytes_s,
        flops_s=gpu.flops_s,
        read_bytes=shape.read_bytes,
        token_bytes=shape.geometry.token_bytes,
        flops_per_row=shape.flops_per_row,
    )


def prefill_rate(cost: CostModel, tokens: int) -> float:
    """Prompt tokens a second, in steps of so many and nothing else."""
    return tokens / cost.step_s(StepWork(0, tokens, tokens, 0))
