"""A Transformer over a small pool as a GPU's runner drives it: rows and page tables on the device. Knows no plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from interleaf.attention.device import DeviceAttention, DeviceRows
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from interleaf.model.transformer import Batch, Transformer
from tests.support.interpreted import DEVICE

SEATS, WIDTH, NUM_PAGES = 8, 64, 120


class DeviceModel:
    """Sequences are numbered from 0; each starts when it is first named.

    Args: make: makes a backend from (pool, query heads, window).
    """

    def __init__(self, model: Transformer, make, page_tokens: int = 4) -> None:
        spec = model.spec
        geometry = PageGeometry(page_tokens, spec.num_layers, spec.num_kv_heads, spec.head_dim, model.dtype.itemsize)
        self.model = model
        self.pool = PagePool(geometry, NUM_PAGES, model.dtype, DEVICE)
        self.pool.data.fill_(torch.nan)
        self.attention: DeviceAttention = make(self.pool, spec.num_heads, spec.sliding_window)
        self.page_tokens = page_tokens
        self.table = np.full((SEATS + 1, WIDTH), NUM_PAGES - 1, dtype=np.int32)
        self.lengths = np.zeros(SEATS + 1, dtype=np.int32)
        self.free = np.random.default_rng(3).permutation(NUM_PAGES - 1).tolist()

    def rows(
        self, decode: Sequence[tuple[int, int]] = (), chunks: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> tuple[DeviceRows, torch.Tensor]:
        """The rows of (sequence, token) and (sequence, tokens), and their tokens; lengths move on past them."""
        parts = [(s, [t]) for s, t in decode] + [(s, list(tokens)) for s, tokens in chunks]
        seats = np.array([s for s, _ in parts], dtype=np.int32)
        q_lens = np.array([len(tokens) for _, tokens in parts], dtype=np.int32)
        positions = [int(self.lengths[s]) + i for s, tokens in parts for i in range(len(tokens))]
        row_seats = seats.repeat(q_lens)
        for seat, position in zip(row_seats, positions, strict=True):
            if position % self.page_tokens == 0:
                self.table[seat, position // self.page_tokens] = self.free.pop()
        slots = [
            int(self.table[s, p // self.page_tokens]) * self.page_tokens + p % self.page_tokens
            for s, p in zip(row_seats, positions, strict=True)
        ]
        self.lengths[seats] += q_lens
        kv_lens = self.lengths[seats]

        rows = DeviceRows(
            table=_there(self.table),
            seats=_there(seats),
            kv_lens=_there(kv_lens),
            q_starts=_there(np.append(0, q_lens.cumsum())),
            slots=_there(slots, torch.int64),
            positions=_there(positions, torch.int64),
            num_decode=len(decode),
            host_seats=seats,
            host_kv_lens=kv_lens,
            host_q_lens=q_lens,
        )
        return rows, _there([t for _, tokens in parts for t in tokens], torch.int64)

    def step(
        self,
        decode: Sequence[tuple[int, int]] = (),
        chunks: Sequence[tuple[int, Sequence[int]]] = (),
        sampled: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Logits, on the CPU."""
        rows, token_ids = self.rows(decode, chunks)
        chosen = None if sampled is None else _there(sampled, torch.int64)
        batch = Batch(token_ids, rows.positions, self.attention.prepare(rows), chosen)
        return self.model.forward(batch, self.pool.data).cpu()


def _there(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, device=DEVICE)
