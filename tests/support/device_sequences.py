"""Sequences on the pages of a device's pool, beside the float64 loops that say what attention over them means.

The pool is NaN but for what has been written; pages are drawn at random. What may differ from the loops is bounded from
the roundings that are made, in `Expected.tolerance`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from interleaf.attention.device import DeviceRows
from interleaf.kernels.rotary import RopeAngles, rotate
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from tests.support.interpreted import DEVICE

LAYERS = 2
LAYER = 1
"""The layer that is computed: the other one's lanes stay NaN."""


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Expected:
    """Per element of the output: what it is, the weighted sum of |v|, and a bound on how far scores may be off."""

    value: torch.Tensor
    magnitude: torch.Tensor
    score_error: torch.Tensor
    tokens: torch.Tensor

    def tolerance(self, dtype):
        """A bound on the error of an implementation that sums in float32 and rounds weights and result to the dtype.

        Weights are rounded (once, by at most `unit` of themselves, or by half of the smallest number of float16), and
        so is the result. The rest is float32's: scores (an error of a score is a relative one of its weight, which also
        stands in the denominator: twice), powers of two good to 2**-22, and a sum of as many terms as there are tokens.
        """
        unit = torch.finfo(dtype).eps / 2
        float32 = 2 * self.score_error + 2**-20 + self.tokens * 2**-23
        tiny = self.tokens * 2.0**-25 * 8 if dtype == torch.float16 else 0
        return (unit + float32) * self.magnitude * 1.01 + unit * self.value.abs() + tiny


class DeviceSequences:
    """Random sequences in a pool; each seat's keys and values are also kept apart, as the dtype has them.

    Args:
        make: makes the backend of a pool.
        window: tokens a row may look back at.
        pages: page ids to draw from; None: all of the pool but the last, which is the padding seat's.
    """

    def __init__(self, make, heads, page_tokens, dtype, *, num_seats=5, window=None, num_pages=200, pages=None):
        self.heads, self.page_tokens, self.dtype, self.window = heads, page_tokens, dtype, window
        self.num_seats = num_seats
        geometry = PageGeometry(page_tokens, LAYERS, heads.kv, heads.dim, dtype.itemsize)
        self.pool = PagePool(geometry, num_pages, dtype, DEVICE)
        if pages is None:
            self.pool.data.fill_(torch.nan)
        else:
            self.pool.data[torch.tensor(pages, device=DEVICE)] = torch.nan
        self.random = torch.Generator().manual_seed(5)
        pages = list(range(num_pages - 1)) if pages is None else pages
        self.free = [pages[i] for i in torch.randperm(len(pages), generator=self.random).tolist()]
        # Entries that mean nothing name a page that does not exist.
        self.table = np.full((num_seats + 1, 512), 2**30, dtype=np.int32)
        self.table[num_seats, 0] = num_pages - 1
        self.history = [(self._none(), self._none()) for _ in range(num_seats)]
        self.attention = make(self.pool, heads.q, window)

    def _none(self):
        return torch.empty(0, self.heads.kv, self.heads.dim, dtype=self.dtype)

    def length(self, seat):
        return len(self.history[seat][0])

    def slot(self, seat, position):
        return int(self.table[seat, position // self.page_tokens]) * self.page_tokens + position % self.page_tokens

    def rand(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def angles(self, positions):
        radians = torch.tensor(positions).float()[:, None, None] * torch.linspace(1, 0.1, self.heads.dim // 2)
        return RopeAngles(radians.cos().repeat(1, 1, 2).to(self.dtype), radians.sin().to(self.dtype))

    def grow(self, seat, count):
        """Give a seat the pages for so many more tokens."""
        length = self.length(seat)
        for position in range(length, length + count):
            if position % self.page_tokens == 0:
                self.table[seat, position // self.page_tokens] = self.free.pop()

    def append(self, seat, k, v):
        keys, values = self.history[seat]
        self.history[seat] = (torch.cat([keys, k]), torch.cat([values, v]))

    def fill(self, seat, count):
        """Tokens that some step before has left in the pool."""
        self.grow(seat, count)
        first = self.length(seat)
        k, v = self.rand(count, self.heads.kv, self.heads.dim), self.rand(count, self.heads.kv, self.heads.dim)
        slots = torch.tensor([self.slot(seat, first + i) for i in range(count)], dtype=torch.int64, device=DEVICE)
        pages, offsets = slots // self.page_tokens, slots % self.page_tokens
        self.pool.data[pages, LAYER, 0, offsets] = k.to(DEVICE)
        self.pool.data[pages, LAYER, 1, offsets] = v.to(DEVICE)
        self.append(seat, k, v)

    def rows(self, decode, chunks=(), padding=0):
        """The rows of a step, each sequence's tokens not yet in its history; pages are given as needed."""
        counts = [*[(seat, 1) for seat in decode], *chunks]
        for seat, count in counts:
            self.grow(seat, count)
        q_lens = np.array([c for _, c in counts] + [1] * padding, dtype=np.int32)
        seats = np.array([s for s, _ in counts] + [self.num_seats] * padding, dtype=np.int32)
        kv_lens = np.array([self.length(s) + c for s, c in counts] + [1] * padding, dtype=np.int32)
        positions = [self.length(s) + i for s, c in counts for i in range(c)]
        slots = [self.slot(s, self.length(s) + i) for s, c in counts for i in range(c)]
        slots += [self.slot(self.num_seats, 0)] * padding
        return DeviceRows(
            table=torch.from_numpy(self.table.copy()).to(DEVICE),
            seats=torch.from_numpy(seats).to(DEVICE),
            kv_lens=torch.from_numpy(kv_lens).to(DEVICE),
            q_starts=torch.from_numpy(np.append(0, q_lens.cumsum()).astype(np.int32)).to(DEVICE),
            slots=torch.tensor(slots, device=DEVICE),
            positions=torch.tensor(positions + [0] * padding, device=DEVICE),
            num_decode=len(decode) + padding,
            host_seats=seats,
            host_kv_lens=kv_lens,
            host_q_lens=q_lens,
        )

    def inputs(self, rows):
        """qkv of a step's rows, and their angles, both on the CPU."""
        shape = (len(rows.positions), self.heads.q + 2 * self.heads.kv, self.heads.dim)
        return self.rand(*shape), self.angles(rows.positions.tolist())

    def expected(self, rows, qkv, angles):
        """What attention must answer; the step's tokens join their histories. Rows that pad a batch are left out."""
        turned = rotate(qkv, angles)
        found, row = [], 0
        for seat, count in zip(rows.host_seats.tolist(), rows.host_q_lens.tolist(), strict=True):
            if seat == self.num_seats:
                continue
            for _ in range(count):
                k, v = turned[row, self.heads.q : -self.heads.kv], qkv[row, -self.heads.kv :]
                self.append(seat, k[None], v[None])
                found.append(self._row(seat, turned[row, : self.heads.q]))
                row += 1
        value, magnitude, score_error, tokens = (torch.stack(part).flatten(1) for part in zip(*found, strict=True))
        return Expected(value, magnitude, score_error, tokens)

    def _row(self, seat, q):
        keys, values = (x.double() for x in self.history[seat])
        first = 0 if self.window is None else max(0, len(keys) - self.window)
        keys, values, q = keys[first:], values[first:], q.double()
        out = torch.empty(4, *q.shape, dtype=torch.float64)
        scale, group = self.heads.dim**-0.5, self.heads.q // self.heads.kv
        for head in range(self.heads.q):
            k, v = keys[:, head // group], values[:, head // group]
            weights = (k @ q[head] * scale).softmax(0)
            out[0, head] = weights @ v
            out[1, head] = weights @ v.abs()
            # A sum of products in float32, in any order, and three more products; in powers of e.
            out[2, head] = (self.heads.dim + 3) * 2.0**-24 * scale * (k.abs() @ q[head].abs()).max()
            out[3, head] = len(k)
        return out

    def step(self, decode, chunks=(), padding=0, prepare="prepare"):
        """Run one step. Returns: (what attention answered, rows that pad left out; what it must answer)."""
        rows = self.rows(decode, chunks, padding)
        qkv, angles = self.inputs(rows)
        step = getattr(self.attention, prepare)(rows)
        out = step.forward(LAYER, qkv.to(DEVICE), RopeAngles(angles.cos.to(DEVICE), angles.sin.to(DEVICE)))
        return out[: len(qkv) - padding].cpu(), self.expected(rows, qkv, angles)

    def check(self, *args, **settings):
        """Run one step and compare."""
        self.compare(*self.step(*args, **settings))

    def compare(self, found, expected):
        assert found.dtype == self.dtype
        error = (found.double() - expected.value).abs()
        excess = error / expected.tolerance(self.dtype)
        assert (excess <= 1).all(), f"error {error.max():.2e}, {excess.nan_to_num(torch.inf).max():.2f} of its bound"
