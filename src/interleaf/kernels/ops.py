"""The LoRA op: checks what it is given, then hands over to the device's implementation."""

from __future__ import annotations

from torch import Tensor

from interleaf.core import LoraGroup
from interleaf.kernels.work import LoraWork


def lora_add(x: Tensor, y: Tensor, pool: Tensor, work: LoraWork, group: LoraGroup, layer: int) -> None:
    """Add each row's own low-rank update to the output of one fused base linear, in place.

    Semantics: for every row t with an adapter and every module m of `group` that this adapter targets in `layer`:
    y[t, out_first_m + o] += sum_r B_m[o, r] * (sum_h A_m[r, h] * x[t, h]). Other elements of y are not written.

    Args:
        x: [T, in], contiguous, the input of the base linear.
        y: [T, out], its output; the modules of the group side by side.
        pool: [P, L, 2, page_tokens, kv_heads, head_dim], contiguous, of the dtype of x and y.
        work: of this step; rows past its last segment are base rows.

    Products are summed in float32. In a 16-bit dtype the update is rounded to it, and so are, for runs of up to
    `reference.FUSED_ROWS` rows, the pieces of A x (one per `PartShape.unit` elements of x) before they are summed.
    Raises: ValueError: a shape, dtype or device does not fit; nothing was written.
    Source: S-LoRA (MLSys 2024) section 5.3; layout in docs/adr/0002-page-geometry.md.
    """
    if not 0 <= layer < work.num_layers:
        raise ValueError(f"layer must be from 0 to {work.num_layers - 1}, got {layer}")
    runs = work.layers[layer].get(group)
    if runs is None:
        return
    _check(x, y, pool, work, runs.in_features, runs.out_features)
    runs.add(x, y, pool, layer * work.lane_elems)


def _check(x: Tensor, y: Tensor, pool: Tensor, work: LoraWork, in_features: int, out_features: int) -> None:
    if not x.dtype == y.dtype == pool.dtype:
        raise ValueError(f"x, y and pool must have one dtype, got {x.dtype}, {y.dtype} and {pool.dtype}")
    if not x.device == y.device == pool.device == work.device:
        raise ValueError(
            f"x, y, pool and work must be on one device, got {x.device}, {y.device}, {pool.device} and {work.device}"
        )
    if x.dim() != 2 or x.shape[1] != in_features or x.shape[0] < work.num_rows or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous [T >= {work.num_rows}, {in_features}], got {list(x.shape)} with strides {x.stride()}"
        )
    if y.dim() != 2 or y.shape[0] != x.shape[0] or y.shape[1] < out_features:
        raise ValueError(f"y must be [{x.shape[0]}, at least {out_features}], got {list(y.shape)}")
    if (
        pool.dim() != 6
        or pool.shape[0] <= work.last_page
        or pool.shape[1] != work.num_layers
        or pool.stride(1) != work.lane_elems
        or not pool.is_contiguous()
    ):
        raise ValueError(
            f"pool must be contiguous [P > {work.last_page}, {work.num_layers}, 2, page_tokens, kv_heads, head_dim] "
            f"with {work.lane_elems} elements a lane, got {list(pool.shape)} with strides {pool.stride()}"
        )
