"""Log-probabilities for callers who ask. Reads raw logits and chosen tokens; knows no seat and no parameter."""

from __future__ import annotations

import numpy as np
import torch

from interleaf.core import TokenLogprobs
from interleaf.engine.sampling_math import largest, row_slices


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor) -> list[TokenLogprobs]:
    """Describe the chosen token of each row and its most probable ones under the model's own distribution.

    The numbers are those of a float32 log_softmax. Equally probable tokens are listed lowest id first. A row with NaN
    or +inf gets NaN for the chosen token and an empty list.
    The results are host numbers: on a device this call waits for it.

    Args:
        logits: [N, V], any float dtype, before temperature and penalties.
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
    rows, ids = hits.cpu().numpy().T
    found = logprobs[hits[:, 0], hits[:, 1]].cpu().numpy()
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
