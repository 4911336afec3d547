"""The GPU's runner on the CPU: its real seats, staging, graphs and copies over plain torch for what kernels do.

Attention and LoRA follow the contracts of `attention.device` and `kernels.device_lora` literally: what a graph may read
are the static tensors, so they are read when a step computes and not when it is prepared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from interleaf.adapters.copy import StreamCopier
from interleaf.attention.device import DeviceAttention, DeviceRows
from interleaf.core import AdapterUid, PooledLayout
from interleaf.engine.build import EngineParts
from interleaf.engine.cuda.runner import CudaRunner
from interleaf.engine.device_sampler import DeviceSampler
from interleaf.engine.engine import Engine
from interleaf.engine.swap import HostPages
from interleaf.kernels import LoraWork, PooledAdapter, build_work
from interleaf.kernels.rotary import RopeAngles, rotate
from interleaf.memory.pool import PagePool
from tests.support.host_device import HostDevice


class LoopAttention:
    """One sequence after the other."""

    def __init__(self, pool: PagePool, heads: int) -> None:
        self.pool = pool
        self.heads = heads

    def prepare(self, rows: DeviceRows) -> LoopStep:
        return LoopStep(self, rows)

    prepare_graph = prepare


@dataclasses.dataclass(frozen=True)
class LoopStep:
    backend: LoopAttention
    rows: DeviceRows

    def forward(self, layer: int, qkv: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
        pool, rows, heads = self.backend.pool, self.rows, self.backend.heads
        page_tokens, kv_heads = pool.geometry.page_tokens, pool.geometry.num_kv_heads
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        q, k = rotate(q, angles), rotate(k, angles)
        page, offset = rows.slots // page_tokens, rows.slots % page_tokens
        pool.data[page, layer, 0, offset] = k
        pool.data[page, layer, 1, offset] = v
        out = torch.empty_like(q)
        for i, seat in enumerate(rows.seats.tolist()):
            first, stop, length = int(rows.q_starts[i]), int(rows.q_starts[i + 1]), int(rows.kv_lens[i])
            pages = rows.table[seat, : -(-length // page_tokens)].long()
            keys, values = (pool.data[pages, layer, h].flatten(0, 1)[:length].transpose(0, 1) for h in (0, 1))
            seen = torch.arange(length) <= torch.arange(length - (stop - first), length)[:, None]
            own = q[first:stop].transpose(0, 1)
            out[first:stop] = scaled_dot_product_attention(own, keys, values, seen, enable_gqa=True).transpose(0, 1)
        return out.flatten(1)


class LiveWork:
    """A work list whose contents change under one identity, as a graph's do."""

    def __init__(self) -> None:
        self.current: LoraWork | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


@dataclasses.dataclass(frozen=True)
class HostLoraStep:
    key: Hashable
    work: LiveWork
    current: LoraWork

    def upload(self) -> None:
        self.work.current = self.current


class HostLora:
    """The CPU's work lists behind the interface of the device's."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.adapters: dict[Hashable, PooledAdapter] = {}
        self.static = LiveWork()

    def add(self, uid: Hashable, layout: PooledLayout, pages: Sequence[int]) -> None:
        geometry = self.pool.geometry
        self.adapters[uid] = PooledAdapter(
            layout, pages, num_layers=geometry.num_layers, lane_elems=geometry.lane_elems
        )

    def remove(self, uid: Hashable) -> None:
        del self.adapters[uid]

    def plan(self, segments: Sequence[tuple[AdapterUid | None, int, int]], *, graph: bool) -> HostLoraStep | None:
        work = build_work([(None if uid is None else self.adapters[uid], first, n) for uid, first, n in segments])
        if work is None:
            return None
        return HostLoraStep("some", self.static if graph else LiveWork(), work)


def on_host_device(
    parts: EngineParts,
    *,
    max_graphs: int = 64,
    max_mixed_graph_rows: int | None = None,
    device: HostDevice | None = None,
    attention: Callable[[PagePool], DeviceAttention] | None = None,
    lora: Callable[[PagePool], Any] | None = None,
    copy_page_s: Callable[[], float] = lambda: math.inf,
) -> EngineParts:
    """An engine on the CPU with the GPU's runner for its own. The scheduler has not planned anything yet."""
    device = device or HostDevice()
    old = parts.runner
    model, config = old._model, parts.config  # the weights are the same
    pool = PagePool(parts.geometry, parts.allocator.num_pages + 1, model.dtype)
    pool.data.fill_(torch.nan)
    sampler = DeviceSampler(config.max_num_seqs, parts.spec.vocab_size, torch.device("cpu"), config.max_num_seqs)
    device.kept = [sampler._state, sampler.last_token]
    runner = CudaRunner(
        device=device,
        model=model,
        pool=pool,
        attention=LoopAttention(pool, parts.spec.num_heads) if attention is None else attention(pool),
        sampler=sampler,
        lora=HostLora(pool) if lora is None else lora(pool),
        copier=StreamCopier(pool, parts.store.image, device),
        num_seats=config.max_num_seqs,
        max_rows=config.max_batch_tokens,
        max_pages=parts.geometry.pages_for_tokens(parts.max_model_len) + 1,
        max_graphs=max_graphs,
        max_mixed_graph_rows=max_mixed_graph_rows,
        swap=HostPages(pool, device.pinned(parts.scheduler.swap.num_slots * parts.geometry.page_bytes).fill_(255)),
        copy_page_s=copy_page_s,
    )
    old.close()
    engine = Engine(parts.scheduler, runner, lookahead=1 if config.overlap else 0)
    return dataclasses.replace(parts, pool=pool, runner=runner, engine=engine)
