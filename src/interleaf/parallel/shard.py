"""Index arithmetic of tensor parallelism: which rows and columns a rank holds. No tensors, no communication.

Base layers follow Megatron-LM (Shoeybi et al. 2019): q, k, v, gate and up are split by output, o and down by input.
Adapters follow their layer at no extra traffic: where the layer is split by output, A is whole on every rank and B is
split like the layer; where it is split by input, A is split like the layer and B is whole, and the product of the
partial A x is added to the layer's own partial sum before its all-reduce. (The other strategy, S-LoRA section 6, splits
A of the first kind too and gathers the r-wide product: less redundant compute, more traffic.)
"""

from __future__ import annotations

from dataclasses import dataclass

from interleaf.core import GROUP_MODULES, MODULE_GROUP, ModelSpec, Module
from interleaf.errors import ConfigError

_SPLIT_BY_OUTPUT = frozenset({Module.Q, Module.K, Module.V, Module.GATE, Module.UP})


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [first, first + count) of an axis."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.count

    def as_slice(self) -> slice:
        return slice(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of one model.

    When there are fewer KV heads than ranks, each KV head is held by several ranks.

    Raises: ConfigError: heads or MLP columns cannot be divided evenly among the ranks.
    """

    spec: ModelSpec
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank must be from 0 to {self.world - 1}, got {self.rank}")
        for name, value in (("num_heads", self.spec.num_heads), ("intermediate_size", self.spec.intermediate_size)):
            if value % self.world:
                raise ConfigError(f"{name}={value} cannot be divided evenly among {self.world} ranks")
        kv = self.spec.num_kv_heads
        if kv % self.world and self.world % kv:
            raise ConfigError(f"num_kv_heads={kv} and {self.world} ranks: one must divide the other")

    def _even(self, n: int) -> Span:
        share = n // self.world
        return Span(self.rank * share, share)

    @property
    def heads(self) -> Span:
        return self._even(self.spec.num_heads)

    @property
    def kv_heads(self) -> Span:
        kv = self.spec.num_kv_heads
        if kv >= self.world:
            return self._even(kv)
        return Span(self.rank * kv // self.world, 1)

    @property
    def intermediate(self) -> Span:
        return self._even(self.spec.intermediate_size)

    def in_span(self, module: Module) -> Span:
        """Columns of a module's weight (and of A) on this rank."""
        if module in _SPLIT_BY_OUTPUT:
            return Span(0, self.spec.in_features(module))
        if module is Module.O:
            return self._scaled(self.heads)
        return self.intermediate

    def out_span(self, module: Module) -> Span:
        """Rows of a module's weight (and of B) on this rank."""
        match module:
            case Module.Q:
                return self._scaled(self.heads)
            case Module.K | Module.V:
                return self._scaled(self.kv_heads)
            case Module.GATE | Module.UP:
                return self.intermediate
            case _:
                return Span(0, self.spec.out_features(module))

    def out_first(self, module: Module) -> int:
        """First column of a module in its group's fused output on this rank."""
        group = GROUP_MODULES[MODULE_GROUP[module]]
        return sum(self.out_span(m).count for m in group[: group.index(module)])

    def widths(self) -> frozenset[int]:
        """Every width that a row of an adapter's stream can have on this rank."""
        return frozenset(w for m in Module for w in (self.in_span(m).count, self.out_span(m).count))

    def _scaled(self, heads: Span) -> Span:
        return Span(heads.first * self.spec.head_dim, heads.count * self.spec.head_dim)
