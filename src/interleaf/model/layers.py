"""The building blocks of a decoder layer. Knows tensors; no names, no checkpoint, no layer order."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


class Linear:
    """One base product, y = x W^T + b, for modules that share their input; its rows of W are theirs one after another.

    How W is kept and multiplied is chosen once (docs/benchmarks/cpu-engine.md has the figures):
    - float32 on a CPU: in oneDNN's blocked order, and only in that. Decode steps of 8 rows are 1.3 times as fast.
    - 16 bits on a CPU without instructions for them: row-major; some rows at a time are widened to float32, which is
      several times as fast as torch's own fallback. Products and sums are float32, and y is rounded once.
    - otherwise: row-major.

    Attributes:
        in_features, out_features: widths on this rank.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        self._widened_rows = max(1, _WIDENED_ELEMS // self.in_features) if _must_widen(weight) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: [T, in], contiguous.   Returns: [T, out], a new tensor."""
        if self._is_packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        if self._widened_rows is None:
            return linear(x, self._weight, self._bias)
        wide = x.float()
        blocks = [torch.mm(wide, rows.float().t()) for rows in self._weight.split(self._widened_rows)]
        out = torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)


_PACKED_FOR_ROWS = 32
"""The batch size for which oneDNN chooses the blocks; it computes others with the same ones."""

_WIDENED_ELEMS = 2**20
"""Elements widened at a time: 4 MB, so that they are multiplied while they are in the cache."""


def _can_pack(weight: torch.Tensor) -> bool:
    # The two operators are those that torch's own compiler emits for a linear layer on a CPU; a build without oneDNN
    # lacks them.
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _must_widen(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return False
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[weight.dtype]
    is_supported = getattr(torch.ops.mkldnn, name, None)
    return is_supported is None or not is_supported()


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 up to the product with the weight.

    Args: weight: [..., n]; leading axes are broadcast against those of x (q and k heads have weights of their own).
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._mean = 1.0 / weight.shape[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(x).mul_(self._weight)

    def add(self, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h += y
        return self(h)

    def in_place(self, x: torch.Tensor) -> None:
        torch.mul(self._scaled(x), self._weight, out=x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._mean).rsqrt_()
        return (wide * scale).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See RowOps."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
