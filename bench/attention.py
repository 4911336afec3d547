"""Attention backends on this GPU: a step's rotation, writing of KV and attention, out of scattered pages.

    python -m bench.attention [--sweep]

bf16, a pool of 32 layers, a CUDA graph of all layers, replayed; microseconds per layer, medians. "TB/s" counts each
token's K and V once, "TFLOP/s" the products that a causal mask leaves. "Append" is the rotation and the writing alone.
`--sweep` tries our decode kernel in other shapes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import torch

from interleaf.attention.device import DeviceAttention, DeviceRows
from interleaf.attention.flashinfer import FlashInferPaged
from interleaf.attention.triton_paged import TritonPaged
from interleaf.kernels import flashinfer_jit
from interleaf.kernels.kv import rotate_and_append
from interleaf.kernels.rotary import RopeAngles
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool

LAYERS, HEAD_DIM = 32, 128
REPLAYS = 20
DEVICE = torch.device("cuda:0")


@dataclass(frozen=True)
class Case:
    """Sequences of `tokens` tokens each; of `rows` rows each in this step: 1 is decode, more a chunk."""

    name: str
    heads: int
    kv_heads: int
    sequences: int
    tokens: int
    rows: int = 1
    page_tokens: int = 16


CASES = [
    Case("8B, 256 of 400", 32, 8, 256, 400),
    Case("8B, 256 of 400, pages of 1", 32, 8, 256, 400, page_tokens=1),
    Case("8B, 64 of 400", 32, 8, 64, 400),
    Case("8B, 16 of 4,096", 32, 8, 16, 4096),
    Case("8B, 1 of 400", 32, 8, 1, 400),
    Case("8B, 1 of 32,768", 32, 8, 1, 32768),
    Case("7B, 256 of 400", 32, 32, 256, 400),
    Case("8B, 16 prompts of 256", 32, 8, 16, 256, rows=256),
    Case("8B, a prompt of 4,096", 32, 8, 1, 4096, rows=4096),
    Case("8B, a prompt of 64", 32, 8, 1, 64, rows=64),
    Case("8B, a prompt of 216", 32, 8, 1, 216, rows=216),
    Case("8B, a prompt of 512", 32, 8, 1, 512, rows=512),
    Case("8B, the last 64 of 1,024", 32, 8, 1, 1024, rows=64),
    Case("8B, the last 512 of 1,024", 32, 8, 1, 1024, rows=512),
    Case("8B, the last 64 of 4,096", 32, 8, 1, 4096, rows=64),
]


class Bench:
    """A case's pool, rows and activations."""

    def __init__(self, case: Case) -> None:
        self.case = case
        pages = -(-case.tokens // case.page_tokens)
        geometry = PageGeometry(case.page_tokens, LAYERS, case.kv_heads, HEAD_DIM, 2)
        num_pages = case.sequences * pages + 1
        self.pool = PagePool(geometry, num_pages, torch.bfloat16, DEVICE)
        # A lane at a time: random numbers of float32 for all of it would not fit.
        for layer in range(LAYERS):
            self.pool.data[:, layer].normal_()
        table = np.random.default_rng(0).permutation(num_pages)[: case.sequences * pages].astype(np.int32)
        table = table.reshape(case.sequences, pages)
        seats = np.arange(case.sequences, dtype=np.int32)
        positions = np.arange(case.tokens - case.rows, case.tokens)
        slots = table[:, positions // case.page_tokens].astype(np.int64) * case.page_tokens
        slots += positions % case.page_tokens
        kv_lens, q_lens = np.full_like(seats, case.tokens), np.full_like(seats, case.rows)
        q_starts = np.arange(case.sequences + 1, dtype=np.int32) * case.rows
        self.rows = DeviceRows(
            *(torch.from_numpy(a).to(DEVICE) for a in (table, seats, kv_lens, q_starts, slots.reshape(-1))),
            positions=torch.from_numpy(np.tile(positions, case.sequences)).to(DEVICE),
            num_decode=case.sequences if case.rows == 1 else 0,
            host_seats=seats,
            host_kv_lens=kv_lens,
            host_q_lens=q_lens,
        )
        num_rows = case.sequences * case.rows
        self.qkv = torch.randn(num_rows, case.heads + 2 * case.kv_heads, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        radians = torch.rand(num_rows, 1, HEAD_DIM // 2, device=DEVICE)
        self.angles = RopeAngles(radians.cos().repeat(1, 1, 2).bfloat16(), radians.sin().bfloat16())

    def ours(self) -> TritonPaged:
        rows = len(self.rows.slots)
        return TritonPaged(self.pool, self.case.heads, max_seqs=self.case.sequences, max_rows=rows)

    def layers_us(self, backend: DeviceAttention) -> float:
        """Microseconds of a layer."""
        prepare = backend.prepare_graph if self.case.rows == 1 else backend.prepare
        step = prepare(self.rows)
        return self._replayed(lambda: self._all(step.forward))

    def append_us(self) -> float:
        """Microseconds of a layer's rotation and writing."""
        slots, pool = self.rows.slots, self.pool.data
        return self._replayed(lambda: self._all(lambda l, qkv, a: rotate_and_append(qkv, a, slots, pool, l)))

    def _all(self, forward: Callable[[int, torch.Tensor, RopeAngles], torch.Tensor]) -> None:
        for layer in range(LAYERS):
            forward(layer, self.qkv, self.angles)

    def _replayed(self, run: Callable[[], None]) -> float:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3 / LAYERS

    def rate(self, us: float) -> str:
        c = self.case
        if c.rows == 1:
            return f"{c.sequences * c.tokens * 2 * c.kv_heads * HEAD_DIM * 2 / us / 1e6:.2f} TB/s"
        seen = c.sequences * sum(range(c.tokens - c.rows + 1, c.tokens + 1))
        return f"{4 * seen * c.heads * HEAD_DIM / us / 1e6:.0f} TFLOP/s"


def sweep(bench: Bench) -> None:
    """Other shapes of the decode kernel."""
    for tokens, stages, warps in product((16, 32, 64, 128), (2, 3, 5), (2, 4)):
        backend = bench.ours()
        backend.shapes.decode |= {"BLOCK_TOKENS": tokens, "STAGES": stages, "num_warps": warps}
        us = bench.layers_us(backend)
        print(f"  {tokens} tokens, {stages} stages, {warps} warps: {us:.1f} us, {bench.rate(us)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="the decode kernel in other shapes, for the first cases")
    args = parser.parse_args()
    with torch.inference_mode():
        for case in CASES[:4] if args.sweep else CASES:
            bench = Bench(case)
            print(f"{case.name}: append {bench.append_us():.1f} us", flush=True)
            if args.sweep:
                sweep(bench)
                continue
            backends: dict[str, DeviceAttention] = {"ours": bench.ours()}
            if flashinfer_jit.is_installed():
                backends["flashinfer"] = FlashInferPaged(bench.pool, case.heads, max_seqs=case.sequences)
            for name, backend in backends.items():
                us = bench.layers_us(backend)
                print(f"  {name}: {us:.1f} us, {bench.rate(us)}", flush=True)


if __name__ == "__main__":
    main()
