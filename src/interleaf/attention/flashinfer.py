"""Attention on a GPU by FlashInfer's paged kernels ("fa2"). Knows plans and work spaces; 16 bits only.

Decode rows and chunks are a launch each: a tile of queries that suits chunks would be mostly empty for a single row.
Both run the same compiled module, decode on tensor cores too: on an H200 that was 125 us against 146 (8B shape, 256
sequences of 400 tokens), and any number of query heads per KV head will do.

A plan says which program computes what, and whether long sequences are split among several programs, whose results
another kernel merges. It is made on the host and sent to the device (see PlanSender). Two cases:

- More decode rows than programs fit the GPU at once: FlashInfer would split none, so splitting is switched off. Then
  the plan depends on the number of rows only, and a graph's is made once; and no merge is launched. (In FlashInfer's
  own graph mode a merge always follows, and a quarter of the programs of 256 rows finds nothing to do.)
- Fewer: planned before every step, in graph mode, which keeps the grid fixed.

Source: FlashInfer (Ye et al., MLSys 2025); flashinfer-python 0.6.11, csrc/batch_prefill.cu and attention/scheduler.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from interleaf.attention.device import DeviceRows
from interleaf.attention.flashinfer_plans import PLAN_BYTES, PlanSender
from interleaf.errors import ConfigError
from interleaf.kernels import flashinfer_jit
from interleaf.kernels.kv import rotate_and_append
from interleaf.kernels.rotary import RopeAngles
from interleaf.memory.pool import PagePool

_GRAPH_PLAN_BYTES = 2**18
_BLOCKS_PER_SM = 2
"""FlashInfer splits sequences until so many programs per multiprocessor have work."""
_UNSPLIT_TOKENS, _UNSPLIT_TOKENS_PER_ROW = 160, 2.5
"""Sequences of chunks are split where one is longer than both allow together: a long sequence takes its time alone, and
merging the parts takes time for each row. (Figures in docs/benchmarks/h200/engine.md.)
"""
_TILES = (16, 64, 128)
_LARGEST_TILE = _TILES[-1]
"""Queries that a program takes at a time: rows times query heads per KV head."""
_PAGES_AT_ONCE = 128

_ALL, _CAUSAL = 0, 1
"""MaskMode: a row sees the whole sequence, or, of the chunk that it is in, what comes before it and itself."""
_SLOT_MAJOR = 0
"""TensorLayout "NHD": page, slot, head, element."""

HostInts = NDArray[np.int32]


class FlashInferPaged:
    """The backend. One stream computes; plans of a step may be made while the step before it runs.

    Args:
        num_heads: query heads; a multiple of the pool's KV heads.
        window: tokens a query may look back at, itself included; None = all.
        max_seqs: sequences of a step at most, padding of a graph's batch included.

    Raises: ConfigError: FlashInfer does not compute the pool's dtype or head size.
    """

    def __init__(self, pool: PagePool, num_heads: int, *, window: int | None = None, max_seqs: int) -> None:
        dtype, kv_heads, head_dim = pool.data.dtype, pool.geometry.num_kv_heads, pool.geometry.head_dim
        if dtype not in flashinfer_jit.HALF_TYPES or head_dim not in flashinfer_jit.HEAD_DIMS:
            raise ConfigError(
                f"attention='flashinfer' takes float16 and bfloat16 and heads of {flashinfer_jit.HEAD_DIMS} elements, "
                f"not {dtype} and {head_dim}"
            )
        self.pool = pool.data
        self.window_left = -1 if window is None else window - 1
        self.module = flashinfer_jit.attention(dtype, head_dim, window is not None)
        # [P, page_tokens, kv_heads, head_dim] each; strides are honoured, so a layer of our pool is taken as it is.
        self.layers = [(pool.data[:, l, 0], pool.data[:, l, 1]) for l in range(pool.geometry.num_layers)]
        self._device = device = pool.data.device
        self.launches_early, multiprocessors = flashinfer_jit.launches_early(device), _multiprocessors(device)
        self._page_tokens = pool.geometry.page_tokens
        self._num_heads, self._group = num_heads, num_heads // kv_heads
        self._programs = multiprocessors * _BLOCKS_PER_SM // kv_heads
        # All launches share it: what lies there is used up before the next one begins.
        self.parts = torch.empty(self._part_bytes(), dtype=torch.uint8, device=device)
        self._decode_plan, self._chunk_plan = (
            torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._sender = PlanSender(device)
        self._max_seqs = max_seqs
        self._graph_indices: Tensor | None = None
        self._graphs: dict[int, FlashInferStep] = {}

    def prepare(self, rows: DeviceRows) -> FlashInferStep:
        """See DeviceAttention."""
        pages = _ceil_div(rows.host_kv_lens, self._page_tokens)
        n, s = rows.num_decode, len(pages)
        lists = self._lists(rows, torch.empty(int(pages.sum()), dtype=torch.int32, device=self._device))
        launches = []
        if n:
            plan = self._plan_decode(pages[:n], self._decode_plan, graph=False)
            launches.append(lists.launch(0, n, _ALL, self._decode_plan, plan))
        if n < s:
            starts = _starts(rows.host_q_lens[n:])
            split = _chunks_pay_a_split(int(rows.host_kv_lens[n:].max()), int(starts[-1]), self.window_left)
            plan = self._plan(starts, pages[n:], self._chunk_plan, causal=True, graph=False, split=split)
            launches.append(lists.launch(n, int(starts[-1]), _CAUSAL, self._chunk_plan, plan))
        lists.fill()
        return FlashInferStep(self, rows.slots, lists, tuple(launches))

    def prepare_graph(self, rows: DeviceRows) -> FlashInferStep:
        """See DeviceAttention. There is one answer per number of rows, whatever the graphs that hold it."""
        n = rows.num_decode
        assert n == len(rows.host_kv_lens), "a graph holds decode rows only"
        pages = _ceil_div(rows.host_kv_lens, self._page_tokens)
        step = self._graphs.get(n)
        if step is None:
            if self._graph_indices is None:
                # Room for sequences as long as the table is wide: pages of a shared prefix count in each of them.
                size = self._max_seqs * rows.table.shape[1]
                self._graph_indices = torch.empty(size, dtype=torch.int32, device=self._device)
            lists = self._lists(rows, self._graph_indices)
            space = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self._device)
            plan = self._plan_decode(pages, space, graph=True)
            step = self._graphs[n] = FlashInferStep(self, rows.slots, lists, (lists.launch(0, n, _ALL, space, plan),))
        elif self._may_split(n):
            plan = self._plan_decode(pages, step.launches[0].space, graph=True)
            assert list(plan) == list(step.launches[0].plan), "the plan of a graph must keep its grid"
        assert step.lists.rows.kv_lens.data_ptr() == rows.kv_lens.data_ptr(), "rows of a graph must not move"
        step.lists.fill()
        return step

    def _part_bytes(self) -> int:
        """Bytes for the parts of split sequences, of any plan.

        Parts are float32, a tile of queries for each query head: of chunks as many as programs fit the GPU; of decode
        rows in a graph up to twice as many, whose tiles just hold the query heads of a KV head.
        """
        tile = next((tile for tile in _TILES if self._group <= tile), _LARGEST_TILE)
        rows = (self._programs + 1) * max(_LARGEST_TILE, 2 * tile)
        return self._num_heads * rows * (self.pool.shape[-1] + 1) * torch.float32.itemsize

    def _may_split(self, num_rows: int) -> bool:
        """Whether FlashInfer would split sequences of so many decode rows."""
        return num_rows * -(-self._group // _LARGEST_TILE) <= self._programs

    def _plan_decode(self, pages: HostInts, space: Tensor, *, graph: bool) -> Any:
        split = self._may_split(len(pages))
        starts = np.arange(len(pages) + 1, dtype=np.int32)
        return self._plan(starts, pages, space, causal=False, graph=graph and split, split=split)

    def _plan(
        self,
        q_starts: HostInts,
        pages: HostInts,
        space: Tensor,
        *,
        causal: bool,
        graph: bool,
        split: bool,
    ) -> Any:
        """Plan a launch and enqueue the upload of the plan to `space`.

        Args:
            q_starts: [S + 1] first row of each sequence, from 0.   pages: [S].
            graph: fix the grid, whatever the lengths.
            split: whether sequences may be split.

        Returns: FlashInfer's sizes and offsets into its work spaces.
        """
        page_starts = torch.from_numpy(_starts(pages))
        kv_heads, head_dim = self.pool.shape[4:]
        host, aside = self._sender.begin(space)
        with self._sender.planning():
            plan = self.module.plan(
                self.parts,
                aside,
                host,
                torch.from_numpy(q_starts),
                page_starts,
                page_starts,  # lengths: fa2 plans by pages and does not look at them
                int(q_starts[-1]),
                len(pages),
                self._num_heads,
                kv_heads,
                self._page_tokens,
                graph,
                head_dim,
                head_dim,
                causal,
                self.window_left,
                -1,  # no fixed size of a split
                not split,
                0,  # programs of other kernels at the same time
            )
        self._sender.send(plan, len(pages), space)
        return plan

    def _lists(self, rows: DeviceRows, indices: Tensor) -> PageLists:
        s = len(rows.seats)
        assert s <= self._max_seqs, f"{s} sequences in a step, at most {self._max_seqs} were announced"
        made = torch.empty(3, s + 1, dtype=torch.int32, device=self._device)
        return PageLists(
            rows=rows,
            page_tokens=self._page_tokens,
            max_seqs=self._max_seqs,
            indices=indices,
            starts=made[0],
            last_page_lens=made[1, :s],
            chunk_starts=made[2, : s - rows.num_decode + 1],
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the attention kernel.

    Attributes:
        rows: of the step.
        mask: _ALL or _CAUSAL.
        space: work space that holds the plan on the device.
        plan: what FlashInfer answered when it made the plan.
        q_starts: first row of each sequence, from the first one's.
        page_starts, last_page_lens: see PageLists, of these sequences.
    """

    rows: slice
    mask: int
    space: Tensor
    plan: Any
    q_starts: Tensor
    page_starts: Tensor
    last_page_lens: Tensor


@dataclass(frozen=True, slots=True)
class PageLists:
    """Pages of a step's sequences one behind another, as FlashInfer reads them. Filled on the device.

    Attributes:
        starts: [S + 1] int32, where each sequence's pages begin in `indices`.
        last_page_lens: [S] int32, tokens in each last page.
        chunk_starts: first row of each chunk, counted from the first one's, and the end of the last.
    """

    rows: DeviceRows
    page_tokens: int
    max_seqs: int
    indices: Tensor
    starts: Tensor
    last_page_lens: Tensor
    chunk_starts: Tensor

    def launch(self, first_seq: int, num_rows: int, mask: int, space: Tensor, plan: Any) -> Launch:
        """A launch for the decode rows (of mask _ALL, from sequence 0) or for the chunks, the sequences behind them."""
        stop = self.rows.num_decode if mask == _ALL else len(self.rows.seats)
        return Launch(
            rows=slice(first_seq, first_seq + num_rows),
            mask=mask,
            space=space,
            plan=plan,
            q_starts=self.rows.q_starts[: stop + 1] if mask == _ALL else self.chunk_starts,
            page_starts=self.starts[first_seq : stop + 1],
            last_page_lens=self.last_page_lens[first_seq:stop],
        )

    def fill(self) -> None:
        """Launch the kernel that makes them."""
        from interleaf.kernels.page_lists import page_lists

        rows, s = self.rows, len(self.rows.seats)
        page_lists[(s,)](
            rows.table,
            rows.table.stride(0),
            rows.seats,
            rows.kv_lens,
            rows.q_starts,
            self.starts,
            self.last_page_lens,
            self.chunk_starts,
            self.indices,
            s,
            rows.num_decode,
            PAGE_TOKENS=self.page_tokens,
            SEQS=1 << (self.max_seqs - 1).bit_length(),  # the same in every step: compiled once
            BLOCK=_PAGES_AT_ONCE,
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """Attention of one step."""

    backend: FlashInferPaged
    slots: Tensor
    lists: PageLists
    launches: tuple[Launch, ...]

    def forward(self, layer: int, qkv: Tensor, angles: RopeAngles) -> Tensor:
        """See StepAttention."""
        backend = self.backend
        q = rotate_and_append(qkv, angles, self.slots, backend.pool, layer)
        out = torch.empty_like(q)
        keys, values = backend.layers[layer]
        for launch in self.launches:
            backend.module.paged_run(
                backend.parts,
                launch.space,
                launch.plan,
                q[launch.rows],
                keys,
                values,
                launch.q_starts,
                launch.page_starts,
                self.lists.indices,
                launch.last_page_lens,
                out[launch.rows],
                None,  # log-sum-exp of the scores
                launch.mask,
                _SLOT_MAJOR,
                backend.window_left,
                backend.launches_early,
                *(None,) * 8,  # custom mask, ALiBi, prefix and item scoring, scales of quantised KV
                0.0,  # no soft cap
                q.shape[2] ** -0.5,
                1.0,  # rotary scale and base, unused
                1.0,
                0,
            )
        return out.view(len(q), -1)


def _chunks_pay_a_split(longest: int, num_rows: int, window_left: int) -> bool:
    """Args: tokens of the longest sequence; rows of all chunks; tokens before it that a row sees at most, or -1."""
    seen = longest if window_left < 0 else min(longest, window_left + num_rows)
    return seen > _UNSPLIT_TOKENS + _UNSPLIT_TOKENS_PER_ROW * num_rows


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _ceil_div(n: HostInts, by: int) -> HostInts:
    return -(-n // by)


def _starts(counts: HostInts) -> HostInts:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
