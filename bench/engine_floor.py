"""The least time in which a GPU could have run a recorded run. Knows plans and shapes; no tensor, no clock.

The floor of a step is the larger of
    (weights + KV + adapters) / 4.3 TB/s        bytes that must be read, each once
    operations / 790 TFLOP/s                    of the products, the attention and the adapters
both measured on an H200. The bytes are those of
    weights    every linear layer, the head if the step samples, the embedding rows of the step's tokens
    KV         what earlier steps have stored of each sequence that has rows in the step, over all layers
    adapters   A and B of every distinct adapter among the step's rows
Activations, norms, page tables and what is written do not count: a floor may be too low, never too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interleaf.core import AdapterUid, ModelSpec, Module, StepPlan

BYTES_PER_S = 4.3e12
FLOP_PER_S = 790e12


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a step of a model costs at least.

    Attributes:
        linear_elems: of the weights of all layers' products.   head_elems: of the output head.
        kv_elems: of K and V of one token, over all layers.
        attention_flops: of one row's attention to one token, over all layers.
    """

    linear_elems: int
    head_elems: int
    hidden_size: int
    kv_elems: int
    attention_flops: int
    itemsize_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, itemsize_bytes: int) -> ModelCosts:
        layer = sum(spec.in_features(m) * spec.out_features(m) for m in Module)
        return cls(
            linear_elems=spec.num_layers * layer,
            head_elems=spec.vocab_size * spec.hidden_size,
            hidden_size=spec.hidden_size,
            kv_elems=spec.num_layers * 2 * spec.kv_size,
            attention_flops=spec.num_layers * 4 * spec.q_size,  # q k and p v, a multiplication and an addition each
            itemsize_bytes=itemsize_bytes,
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step: what it computed, and what it had to read.

    Attributes:
        rows: of the batch.   decode_rows: those that continue a sequence by one token.
        adapters: distinct ones among the rows.
    """

    rows: int
    decode_rows: int
    adapters: int
    weight_bytes: int
    kv_bytes: int
    adapter_bytes: int
    flops: int

    @property
    def bytes_s(self) -> float:
        return (self.weight_bytes + self.kv_bytes + self.adapter_bytes) / BYTES_PER_S

    @property
    def floor_s(self) -> float:
        return max(self.bytes_s, self.flops / FLOP_PER_S)


def step_costs(
    plans: Iterable[StepPlan], costs: ModelCosts, adapter_bytes: Mapping[AdapterUid, int], num_seats: int
) -> list[StepCost]:
    """The cost of every plan of a run that began with all seats empty.

    Args:
        adapter_bytes: bytes of A and B of each adapter that the plans name.
    """
    uids = list(adapter_bytes)
    index = {uid: i for i, uid in enumerate(uids)}
    bytes_of = np.array([adapter_bytes[uid] for uid in uids] + [0], dtype=np.int64)  # the last is the base model
    base = len(uids)
    adapter_of = np.full(num_seats, base, dtype=np.int64)
    stored = np.zeros(num_seats, dtype=np.int64)
    seats = np.zeros(0, dtype=np.int64)
    decode: tuple[int, ...] = ()
    out = []
    for plan in plans:
        for start in plan.start:
            adapter_of[start.seat] = base if start.adapter is None else index[start.adapter]
            stored[start.seat] = getattr(start, "num_cached", 0)
        if plan.decode is not decode:
            decode, seats = plan.decode, np.array(plan.decode, dtype=np.int64)
        present = np.zeros(base + 1, dtype=bool)
        present[adapter_of[seats]] = True
        context = int(stored[seats].sum())
        pairs = context + len(seats)  # (row, token it attends to): a row attends to itself, too
        lora_elems = int(bytes_of[adapter_of[seats]].sum())
        stored[seats] += 1
        for chunk in plan.chunks:
            assert stored[chunk.seat] == chunk.first, f"seat {chunk.seat}: a chunk from {chunk.first} on"
            context += chunk.first
            pairs += chunk.count * chunk.first + chunk.count * (chunk.count + 1) // 2
            present[adapter_of[chunk.seat]] = True
            lora_elems += chunk.count * int(bytes_of[adapter_of[chunk.seat]])
            stored[chunk.seat] += chunk.count
        present[base] = False
        rows, sampled = plan.num_tokens, len(plan.sampled_seats)
        head = costs.head_elems if sampled else 0
        lora_elems //= costs.itemsize_bytes
        weights = (costs.linear_elems + head + rows * costs.hidden_size) if rows else 0
        out.append(
            StepCost(
                rows=rows,
                decode_rows=len(seats),
                adapters=int(present.sum()),
                weight_bytes=weights * costs.itemsize_bytes,
                kv_bytes=context * costs.kv_elems * costs.itemsize_bytes,
                adapter_bytes=int(bytes_of[present].sum()),
                flops=2 * (rows * costs.linear_elems + sampled * costs.head_elems + lora_elems)
                + pairs * costs.attention_flops,
            )
        )
    return out


def total_floor_s(steps: Sequence[StepCost]) -> float:
    """Seconds in which the whole run could have been computed."""
    return sum(step.floor_s for step in steps)
