"""FlashInfer's "fa2" library as loops over rows: the same arguments, the same places where it reads and writes.

Plans lie in the work spaces that launches are given. An upload from the pinned buffer to the device happens when the
device comes to it, not when it is enqueued: when the launch that follows it runs. The planner's own copy, behind all
other copies, never does in time.
"""

from __future__ import annotations

import numpy as np
import torch

HEADER = 9


class FakeFa2:
    """Functions `plan` and `paged_run`.

    `send` stands for interleaf.kernels.uploads.send.

    Attributes:
        plans: what each plan was told, in order.
    """

    def __init__(self, multiprocessors):
        self.programs = 2 * multiprocessors
        self.plans = []
        self._copies = []
        self._made = None

    def plan(
        self, parts, space, pinned, q_starts, page_starts, lengths, rows, seqs, heads, kv_heads, page_tokens, graph,
        head_dim, head_dim_v, causal, window_left, split_size, no_split, colocated,
    ):  # fmt: skip
        assert not any(x.is_cuda for x in (pinned, q_starts, page_starts, lengths))
        assert q_starts.dtype == page_starts.dtype == torch.int32
        assert len(q_starts) == len(page_starts) == seqs + 1
        assert q_starts[0] == 0
        assert q_starts[-1] == rows
        assert head_dim_v == head_dim
        assert (split_size, colocated) == (-1, 0)
        pages = np.diff(page_starts.numpy())
        assert (pages > 0).all()
        can_split = self.programs // kv_heads
        assert not (graph and no_split), "unused programs of a graph would read what nobody wrote"
        told = {"seqs": seqs, "rows": rows, "causal": causal, "graph": graph, "split": not no_split, "pages": pages}
        self.plans.append(told)
        # A fixed grid has a program for each sequence and each one that could be split off.
        grid = max(can_split, rows) if graph else int(pages.sum())
        words = pinned[: 4 * (HEADER + seqs)].view(torch.int32)
        shape = [heads, kv_heads, page_tokens]
        words[:HEADER] = torch.tensor([len(self.plans), seqs, rows, *shape, causal, window_left, not no_split])
        words[HEADER:] = torch.from_numpy(pages)
        space.fill_(0xFF)
        assert self._made is None, "a plan was not sent"
        self._made = (len(self.plans), words, space.data_ptr())
        return [grid, rows, len(self.plans) if not graph else 0]

    def send(self, host, target):
        number, words, aside = self._made
        self._made = None
        assert host.data_ptr() == words.data_ptr()
        assert host.nbytes == target.nbytes >= words.nbytes
        assert target.data_ptr() != aside, "the planner's own copy may come at any time"
        self._copies.append((number, words, target))

    def paged_run(
        self, parts, space, plan, q, keys, values, q_starts, page_starts, indices, last_page_lens, out, lse, mask,
        layout, window_left, early, *rest,
    ):  # fmt: skip
        extra, (soft_cap, scale, *rotary, items) = rest[:8], rest[8:]
        assert extra == (None,) * 8
        assert (lse, layout, soft_cap, rotary, items) == (None, 0, 0.0, [1.0, 1.0], 0)
        told = self._arrived(space, plan)
        _, seqs, rows, heads, kv_heads, page_tokens, causal, planned_window, split, *pages = told
        assert (rows, heads, kv_heads) == (len(q), q.shape[1], keys.shape[2])
        assert (bool(causal), planned_window) == (mask == 1, window_left)
        assert keys.shape[1] == page_tokens
        assert keys.stride() == values.stride()
        assert len(page_starts) == len(q_starts) == seqs + 1
        # Without splits a plan does not depend on lengths.
        assert not split or page_starts.diff().tolist() == pages[:seqs], "the device's lists are not those planned"
        for s in range(seqs):
            ids = indices[page_starts[s] : page_starts[s + 1]].long()
            length = (len(ids) - 1) * page_tokens + int(last_page_lens[s])
            assert 1 <= last_page_lens[s] <= page_tokens
            k, v = (x[ids].flatten(0, 1)[:length].float() for x in (keys, values))
            first, stop = int(q_starts[s]), int(q_starts[s + 1])
            for row in range(first, stop):
                behind = stop - 1 - row
                seen = length - behind if mask == 1 else length
                start = 0 if window_left < 0 else max(0, length - behind - 1 - window_left)
                group = heads // kv_heads
                past = slice(start, seen)
                by_kv_head = q[row].float().view(kv_heads, group, -1)
                weights = torch.einsum("kgd,tkd->kgt", by_kv_head, k[past]).mul(scale).softmax(-1)
                out[row] = torch.einsum("kgt,tkd->kgd", weights, v[past]).flatten(0, 1).to(out.dtype)

    def _arrived(self, space, plan):
        """The plan that lies in a work space when its launch runs: copies up to it have been carried out, in order."""
        last = (
            plan[2] or max(number for number, _, to in self._copies if to.data_ptr() == space.data_ptr())
            if self._copies
            else 0
        )
        while self._copies and self._copies[0][0] <= last:
            _, words, to = self._copies.pop(0)
            to[: words.nbytes].copy_(words.view(torch.uint8))
        words = space.view(torch.int32).tolist()
        assert not plan[2] or words[0] == plan[2], "another plan lies in this work space"
        return words
