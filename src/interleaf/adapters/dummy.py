"""Adapters of random weights, by seed: for benchmarks and tests, which need thousands. Reads no file.

Every matrix is a window onto one table of normal numbers, at a place drawn from (seed, layer, module, half). So an
adapter of any size is made in milliseconds and takes no memory of its own, and its uid is a digest of what was asked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache

import torch

from interleaf.adapters.parsed import LoraPair, ModuleAt, ParsedAdapter
from interleaf.adapters.peft_keys import Half
from interleaf.adapters.problems import Problems, shown
from interleaf.core import AdapterUid, ModelSpec, Module
from interleaf.errors import AdapterRejected

DUMMY_PREFIX = "dummy:"

_MAX_RANK = 4096
_MAX_SEED = 2**63 - 1
_SHORT_NAMES = {module.removesuffix("_proj"): module for module in Module}

_STD = 0.02
"""Of A and of B: that of the base weights of a freshly initialised Llama."""

_ALPHA = 2.0
"""With rsLoRA's scale, alpha / sqrt(rank), the weight change has a standard deviation of 2 * 0.02**2 = 0.0008 at every
rank: 4 % of such base weights, which is that of a thoroughly trained adapter."""

_TABLE_SEED = 20231106
_MIN_TABLE_ELEMS = 2**22


def make_dummy(source: str, spec: ModelSpec) -> ParsedAdapter:
    """The adapter that "dummy:r=R,targets=T,seed=S" names; parts in any order, each may be left out.

    `targets` is "all" or modules joined by "+" (q, k, v, o, gate, up, down); defaults are r=16, targets=all, seed=0.

    Raises: AdapterRejected: a part is unknown, stands twice, or is out of range.
    """
    rank, targets, seed = _parse(source)
    widths = {module: (spec.in_features(module), spec.out_features(module)) for module in targets}
    table = _table(max(_MIN_TABLE_ELEMS, 4 * rank * max(max(pair) for pair in widths.values())))
    scale = _ALPHA / rank**0.5
    pairs: dict[ModuleAt, LoraPair] = {}
    for layer in range(spec.num_layers):
        for module, (inputs, outputs) in widths.items():
            a = _window(table, rank * inputs, f"{seed} {layer} {module} {Half.A}").view(rank, inputs)
            b = _window(table, outputs * rank, f"{seed} {layer} {module} {Half.B}").view(outputs, rank)
            pairs[layer, module] = LoraPair(a, b, scale)
    asked = f"interleaf dummy v1\n{rank} {seed} {spec.num_layers} {widths}"
    return ParsedAdapter(AdapterUid(hashlib.sha256(asked.encode()).hexdigest()), pairs, source)


def _parse(source: str) -> tuple[int, tuple[Module, ...], int]:
    problems = Problems()
    values: dict[str, str] = {}
    for part in filter(None, source.removeprefix(DUMMY_PREFIX).split(",")):
        name, equals, value = part.strip().partition("=")
        if name not in ("r", "targets", "seed") or not equals:
            problems.add(f"{shown(part)} is not one of r=..., targets=..., seed=...")
        elif name in values:
            problems.add(f"{name} stands twice")
        values.setdefault(name, value)
    rank = _number("r", values.get("r", "16"), 1, _MAX_RANK, problems)
    seed = _number("seed", values.get("seed", "0"), 0, _MAX_SEED, problems)
    targets = tuple(_targets(values.get("targets", "all"), problems))
    if problems:
        raise AdapterRejected(source, list(problems))
    return rank, tuple(module for module in Module if module in targets), seed


def _number(name: str, text: str, low: int, high: int, problems: Problems) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,19}", text) else low - 1
    if not low <= value <= high:
        problems.add(f"{name} must be a whole number from {low} to {high}, got {shown(text)}")
    return value


def _targets(text: str, problems: Problems) -> Iterator[Module]:
    if text == "all":
        yield from Module
        return
    for name in text.split("+"):
        if name in _SHORT_NAMES:
            yield _SHORT_NAMES[name]
        else:
            problems.add(f"targets must be all, or {', '.join(_SHORT_NAMES)} joined by +, got {shown(name)}")


@lru_cache(maxsize=1)
def _table(elems: int) -> torch.Tensor:
    return torch.randn(elems, generator=torch.Generator().manual_seed(_TABLE_SEED)) * _STD


def _window(table: torch.Tensor, elems: int, what: str) -> torch.Tensor:
    place = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little")
    first = place % (len(table) - elems)
    return table[first : first + elems]
