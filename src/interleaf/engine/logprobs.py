"""Log-probabilities for callers who ask. Reads raw logits and chosen tokens; knows no seat and no parameter.

On the CPU `token_logprobs` gives them at once. A GPU must not be waited for: there `pack_logprobs` leaves them in one
tensor, and `unpack_logprobs` reads its copy on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from interleaf.core import TokenLogprobs
from interleaf.engine.sampling_math import largest, row_slices


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor) -> list[TokenLogprobs]:
    """Describe the chosen token of each row and its most probable ones under the model's own distribution.

    The numbers are those of a float32 log_softmax. Equally probable tokens are listed lowest id first. A row with NaN
    or +inf gets NaN for the chosen token and an empty list.

    Args:
        logits: [N, V] on the CPU, any float dtype, before temperature and penalties.
        token_ids: [N] int64, the chosen tokens.
        num_top: [N] int64, how many of the most probable tokens to list; more than V lists V.
    """
    entries: list[TokenLogprobs] = []
    for rows in row_slices(0, logits.shape[0], logits):
        entries += _describe(logits[rows].float().log_softmax(-1), token_ids[rows], num_top[rows])
    return entries


def _describe(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor) -> list[TokenLogprobs]:
    num_top = num_top.clamp(max=logprobs.shape[1])
    chosen = logprobs.gather(1, token_ids[:, None])
    # Compared and counted in float32, exact to 2**24: torch turns bool into int64 before it sums.
    ranks = logprobs.clone().ge_(chosen).sum(-1).long().clamp_(min=1)
    # All ties with the last one listed come along, and the lowest ids of them stay.
    values = largest(logprobs, max(1, int(num_top.max())))
    floor = values.gather(1, (num_top - 1).clamp(min=0)[:, None]).masked_fill(num_top[:, None] == 0, torch.inf)
    hits = (logprobs >= floor).nonzero()
    rows, ids = hits.numpy().T
    found = logprobs[hits[:, 0], hits[:, 1]].numpy()
    order = np.lexsort((ids, -found, rows))
    ids, found = ids[order], found[order]
    first = np.searchsorted(rows, np.arange(len(logprobs) + 1))

    return [
        TokenLogprobs(
            chosen=value,
            rank=rank,
            top_ids=tuple(ids[low : min(low + count, high)].tolist()),
            top=tuple(found[low : min(low + count, high)].tolist()),
        )
        for value, rank, count, low, high in zip(
            chosen[:, 0].tolist(), ranks.tolist(), num_top.tolist(), first[:-1], first[1:], strict=True
        )
    ]


_LOW_32 = 2**32 - 1


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bits of a float32 -> an integer of the same order, and back: int64."""
    return torch.where(bits < 0, -(2**31) - bits, bits)


def pack_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """What `token_logprobs` finds, as a tensor on the device: nothing here waits for it.

    Args: logits: [N, V], any float dtype.   token_ids: [N] int64.   num_top: tokens listed for each row, at most V.
    Returns: [N, 1 + num_top] int64, each two numbers of 32 bits: bits of the chosen token's log-probability and its
        rank; then for each of the most probable tokens its log-probability, as an integer of the same order, and its
        id subtracted from 2**32 - 1, so that the order of these numbers ranks equal ones by id.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs >= chosen).sum(-1, keepdim=True).clamp_(min=1)
    packed = [(chosen.view(torch.int32).long() << 32) | ranks]
    if num_top:
        ids = torch.arange(logprobs.shape[1], device=logprobs.device)
        keys = _ordered(logprobs.view(torch.int32).long()) << 32 | (_LOW_32 - ids)
        packed.append(keys.topk(num_top, dim=-1).values)
    return torch.cat(packed, dim=1)


def unpack_logprobs(packed: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Read what `pack_logprobs` has packed, on the host.

    Args: num_top: how many of the tokens that are packed each row lists.
    """
    chosen = (packed[:, 0] >> 32).int().view(torch.float32)
    ranks = packed[:, 0] & _LOW_32
    values = _ordered(packed[:, 1:] >> 32).int().view(torch.float32)
    ids = _LOW_32 - (packed[:, 1:] & _LOW_32)
    entries = []
    for value, rank, count, top, top_ids in zip(
        chosen.tolist(), ranks.tolist(), num_top, values.tolist(), ids.tolist(), strict=True
    ):
        count = 0 if math.isnan(value) else count
        entries.append(TokenLogprobs(chosen=value, rank=rank, top_ids=tuple(top_ids[:count]), top=tuple(top[:count])))
    return entries
