"""Draws tokens from rows of logits on the CPU. Knows tensors and numbers only: no seat, no sequence, no state.

A row's token depends on that row alone, to the bit: probabilities are turned into 40-bit fixed-point weights, whose
sums are exact in any order, and the uniform comes from a counter, not from a generator. So neighbours in the batch,
the seat, and a preemption in between change nothing.

Filters work on the *values* of the largest logits, sorted, without their ids: a value sort costs a fraction of an
index sort, and numpy's partition (vectorised quickselect) finds the 1024 largest of 49152 in 0.07 ms a row
where torch.topk takes 1.6 ms. The id is looked up once, for the one value that was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

WEIGHT_BITS = 40
"""The most probable token weighs 2**40. Tokens 2**-40 as probable are never drawn; 2**23 tokens sum below 2**63."""

FILTER_WIDTH = 1024
"""Largest logits looked at first; a row whose kept tokens do not end within them is sorted whole."""

_CHUNK = 128
"""Weights summed as one block when a row is searched; divides the vocabularies of the common families."""

_SLICE_ELEMS = 2**20
"""Logits worked on at a time. Larger temporaries go back to the system after each step and are faulted in
again: 32 x 49152 in one piece takes 6100 page faults a step and two to four times as long."""

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: torch has no arithmetic on uint64."""
    return value - 2**64 if value >= 2**63 else value


def stream_key(seed: int) -> int:
    """Spread a seed over 64 bits (as int64), so that neighbouring seeds give unrelated streams.

    Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014).
    """
    z = (seed + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return _signed(z ^ (z >> 31))


def uniforms(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The `index`-th number of each stream, in [0, 1).

    Semantics: SplitMix64's output function of keys + (index + 1) * golden ratio; its upper 53 bits, times 2**-53.
    Args: keys: [N] int64, from `stream_key`.   index: [N] int64, the output position.
    Returns: [N] float64.
    """

    def mix(z: torch.Tensor, shift: int) -> torch.Tensor:
        return z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))  # the mask makes int64's shift a logical one

    z = keys + (index + 1) * _signed(_GOLDEN)
    z = mix(z, 30) * _signed(_MIX_1)
    z = mix(z, 27) * _signed(_MIX_2)
    return ((mix(z, 31) >> 11) & (2**53 - 1)).double() * 2.0**-53


def first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id among the largest of each row, [N] int64; of a row with NaN the first NaN.

    numpy scans float32 ten times faster than torch does (32 x 49152: 0.11 ms against 1.6).
    """
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, largest first (NaN counts as largest): [N, V] -> [N, count]."""
    values, drop = logits.numpy(), logits.shape[1] - count
    tail = np.partition(values, drop, axis=-1)[:, drop:] if drop else values.copy()
    tail.sort(axis=-1)
    return torch.from_numpy(tail[:, ::-1].copy())


@dataclass(frozen=True, slots=True)
class Filters:
    """What cuts the distribution of each row before the draw; every tensor is [N].

    They apply in this order, each to the probabilities that the previous one left: min_p, top_k, top_p. (vLLM's order;
    min_p commutes with top_k, top_p with neither.) Equally probable tokens are kept from the lowest id up.

    Attributes:
        top_k: int64; the vocabulary's size where it is off.
        top_p: float64; 1 where it is off.
        min_p: float64; 0 where it is off.
        nucleus: bool; rows that only top_p cuts: its share is one of the whole vocabulary.
        num_nucleus: the nucleus rows come first, this many.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    nucleus: torch.Tensor
    num_nucleus: int

    def rows(self, first: int, end: int) -> Filters:
        """The filters of rows [first, end)."""
        at = slice(first, end)
        num_nucleus = min(max(self.num_nucleus - first, 0), end - first)
        return Filters(self.top_k[at], self.top_p[at], self.min_p[at], self.nucleus[at], num_nucleus)


def row_slices(first: int, end: int, logits: torch.Tensor) -> Iterator[slice]:
    """Rows [first, end) of `logits`, a share at a time."""
    size = max(1, _SLICE_ELEMS // logits.shape[1])
    return (slice(at, min(at + size, end)) for at in range(first, end, size))


def draw(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, filters: Filters, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw one token per row: inverse of the cumulative distribution at `uniform`.

    Rows 0..F (F = rows of `filters`) walk their kept tokens from the most probable down, ties by id; the other rows
    have no filter and walk the whole vocabulary by id.

    Args:
        logits: [N, V] float32; overwritten.
        best: [N] int64, `first_argmax(logits)`; it is the answer where the largest logit is NaN or infinite, since
            such a row has no distribution. It costs the other rows nothing.
        temperature: [N] float32, above 0.   uniform: [N] float64 in [0, 1).
    Returns: [N] int64.
    """
    num_filtered = filters.top_k.shape[0]
    top = logits.gather(1, best[:, None])
    chosen = torch.empty_like(best)
    for rows in row_slices(0, num_filtered, logits):
        cuts = filters.rows(rows.start, rows.stop)
        chosen[rows] = _draw_filtered(logits[rows], top[rows], temperature[rows], cuts, uniform[rows])
    for rows in row_slices(num_filtered, logits.shape[0], logits):
        weights = _weights(logits[rows], top[rows], temperature[rows])
        chosen[rows] = _search(weights, uniform=uniform[rows])
    return torch.where(top[:, 0].isfinite(), chosen, best)


def _weights(values: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((value - top) / temperature) as int64 in units of 2**-WEIGHT_BITS; 0 for NaN."""
    # A temperature that float32 rounds to 0 would divide 0 by 0; at the smallest one the largest logits share all.
    scale = temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    share = (values - top).div_(scale).exp_().nan_to_num_(0.0)
    return share.mul_(2.0**WEIGHT_BITS).long()


def _target(uniform: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(uniform * total), held inside [0, total) against rounding; 0 for a row without weight."""
    return torch.minimum((uniform * total.double()).long(), total - 1).clamp_(min=0)


def _search(
    weights: torch.Tensor, *, uniform: torch.Tensor | None = None, target: torch.Tensor | None = None
) -> torch.Tensor:
    """The first column of each row at which the cumulative weight exceeds the target.

    Args: weights: [N, V], whole numbers of any dtype.   target: [N]; else it is `uniform` of each row's total.
    Returns: [N] int64; a row without weight gives some column.
    """
    width = weights.shape[1]
    padded = F.pad(weights, (0, -width % _CHUNK)) if width % _CHUNK else weights
    blocks = padded.view(weights.shape[0], -1, _CHUNK)
    ends = blocks.sum(-1, dtype=weights.dtype).cumsum(-1)
    if target is None:
        assert uniform is not None
        target = _target(uniform, ends[:, -1])
    block = (ends <= target[:, None]).sum(-1).clamp_(max=blocks.shape[1] - 1)
    row = torch.arange(len(block), device=block.device)
    inside = blocks[row, block].cumsum(-1)
    rest = target - (ends[row, block] - inside[:, -1])
    return (block * _CHUNK + (inside <= rest[:, None]).sum(-1)).clamp_(max=width - 1)


def _draw_filtered(
    logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, filters: Filters, uniform: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    total = torch.zeros_like(filters.top_k)
    if n := filters.num_nucleus:
        total[:n] = _weights(logits[:n], top[:n], temperature[:n]).sum(-1)
    width = min(FILTER_WIDTH, vocab_size)

    def cut(rows: torch.Tensor | slice, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = largest(logits[rows], width)
        weights = _weights(values, top[rows], temperature[rows])
        kept, settled = _num_kept(weights, total[rows], filters, rows, vocab_size)
        ends = weights.cumsum(-1)
        target = _target(uniform[rows], ends.gather(1, kept[:, None] - 1)[:, 0])
        place = (ends <= target[:, None]).sum(-1).clamp_(max=width - 1)
        value = values.gather(1, place[:, None])
        return value, place - (values > value).sum(-1), settled

    value, tie, settled = cut(slice(None), width)
    if width < vocab_size and not bool(settled.all()):
        rows = (~settled).nonzero()[:, 0]
        value[rows], tie[rows], _ = cut(rows, vocab_size)
    # In place and in float32: torch compares into bool several times slower.
    return _search(logits.eq_(value), target=tie)


def _num_kept(
    weights: torch.Tensor, total: torch.Tensor, filters: Filters, rows: torch.Tensor | slice, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the largest tokens each row keeps, at least 1; and whether `weights` were enough to tell.

    Args:
        weights: [N, W], of the W largest tokens, largest first.
        total: [N], weight of the whole vocabulary; read for nucleus rows.
        rows: the rows of `filters` that these are.
    """
    width = weights.shape[1]
    top_k, top_p, nucleus = filters.top_k[rows], filters.top_p[rows], filters.nucleus[rows]
    ends = weights.cumsum(-1)
    floor = filters.min_p[rows] * 2.0**WEIGHT_BITS
    likely = (weights.double() >= floor[:, None]).sum(-1)
    likely = torch.where(likely == width, vocab_size, likely)  # the whole width: perhaps more beyond it
    limit = torch.minimum(top_k, likely).clamp_(min=1)
    known = limit <= width
    kept_weight = ends.gather(1, limit.clamp(max=width)[:, None] - 1)[:, 0]
    mass = torch.where(nucleus, total, kept_weight).double() * top_p
    enough = (ends.double() < mass[:, None]).sum(-1) + 1
    # top_p = 1 keeps all of `limit`: the comparison above would drop its tokens of weight zero only.
    kept = torch.minimum(limit, torch.where(top_p < 1.0, enough, vocab_size))
    return kept.clamp(max=width), known | (nucleus & (enough <= width)) | (width == vocab_size)
