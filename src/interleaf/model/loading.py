"""Which tensors of a checkpoint make up a model, and how they are cut and fused. Knows names; computes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from interleaf.core import GROUP_MODULES, LoraGroup, ModelSpec, Module
from interleaf.errors import CheckpointError
from interleaf.parallel.shard import Shard, Span

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that old checkpoints hold and that follow from the configuration."""

_LISTED = 8
"""Names that an error lists at most."""


class NamedTensors(Protocol):
    """What is asked of a checkpoint; those of `weights` are some. Names are Hugging Face's."""

    def names(self) -> frozenset[str]:
        """Every tensor that `get` can return."""

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        """One tensor, or some rows (axis 0) and columns (axis 1) of it."""


@runtime_checkable
class DeviceTensors(Protocol):
    """What a checkpoint may offer besides: to put a tensor where it is wanted, with no copy in ordinary memory."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""

    def fill(self, out: torch.Tensor, name: str, rows: slice | None = None, cols: slice | None = None) -> None:
        """Fill a contiguous tensor with one, or with some rows and columns of it, in the dtype of `out`."""


class TensorReader:
    """Reads the tensors of one model, each once. Construction says which are missing or left over.

    Raises: CheckpointError: a tensor is missing, left over, or of another shape.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        checkpoint: NamedTensors,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._spec = spec
        self._shard = shard
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._fills = device.type != "cpu" and isinstance(checkpoint, DeviceTensors)
        self._num_read = 0
        self._extremes: dict[str, torch.Tensor] = {}
        present = checkpoint.names()
        expected = _expected_names(spec)
        self._has_copy_of_head = spec.tie_embeddings and _HEAD in present
        if self._has_copy_of_head:
            expected.add(_HEAD)
        if missing := sorted(expected - present):
            raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
        if extra := sorted(n for n in present - expected if not _DERIVED.fullmatch(n)):
            raise CheckpointError(f"the checkpoint holds {_listing(extra)}, which the configuration has no place for")
        self._num_tensors = len(expected)

    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden]"""
        return self._read(_EMBEDDING, self._vocabulary)

    def head(self, embed: torch.Tensor) -> torch.Tensor:
        """[vocabulary, hidden]; `embed` itself where embeddings are tied."""
        if not self._spec.tie_embeddings:
            return self._read(_HEAD, self._vocabulary)
        if self._has_copy_of_head and not torch.equal(self._read(_HEAD, self._vocabulary), embed):
            raise CheckpointError(f"{_HEAD} differs from {_EMBEDDING}, and tie_word_embeddings says it is the same")
        return embed

    def norm(self, name: str) -> torch.Tensor:
        """[hidden]"""
        return self._read(name, (Span(0, self._spec.hidden_size),))

    def qk_norm(self, layer: int) -> torch.Tensor:
        """[q heads + k heads, head_dim]: a row per head of the fused projection."""
        prefix = f"model.layers.{layer}.self_attn"
        width = (Span(0, self._spec.head_dim),)
        q, k = (self._read(f"{prefix}.{name}_norm.weight", width) for name in "qk")
        return torch.cat([q.expand(self._shard.heads.count, -1), k.expand(self._shard.kv_heads.count, -1)])

    def group(self, layer: int, group: LoraGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [out, in] and bias [out] of one fused product."""
        modules = GROUP_MODULES[group]
        outs = [self._shard.out_span(m) for m in modules]
        ins = self._shard.in_span(modules[0])
        weight = torch.empty(sum(s.count for s in outs), ins.count, dtype=self._dtype, device=self._device)
        has_bias = _has_bias(self._spec, modules[0])
        bias = weight.new_empty(len(weight)) if has_bias else None
        first = 0
        for module, out in zip(modules, outs, strict=True):
            name = f"model.layers.{layer}.{_path(module)}"
            self._read_into(weight[first : first + out.count], f"{name}.weight", (out, ins))
            if bias is not None:
                self._read_into(bias[first : first + out.count], f"{name}.bias", (out,))
            first += out.count
        return weight, bias

    def require_finite(self) -> None:
        """To be called in the end: one value that is not finite would make every answer NaN.

        Raises: CheckpointError: a tensor that was read has one.
        """
        extremes = torch.stack([*self._extremes.values()])
        wrong = (~extremes.isfinite().all(1)).nonzero().flatten().tolist()
        if wrong:
            names = [*self._extremes]
            raise CheckpointError(
                f"the checkpoint holds values that are NaN or infinite in {str(self._dtype).removeprefix('torch.')}, "
                f"whose largest is {torch.finfo(self._dtype).max:g}, in {_listing([names[i] for i in wrong])}"
            )

    @property
    def _vocabulary(self) -> tuple[Span, Span]:
        return Span(0, self._spec.vocab_size), Span(0, self._spec.hidden_size)

    def _read(self, name: str, spans: tuple[Span, ...]) -> torch.Tensor:
        """A tensor of its own, or the checkpoint's if it is on the right device and of the right dtype."""
        if not self._fills:
            found = self._get(name, spans).to(self._device, self._dtype)
            self._note_extremes(name, found)
            return found
        out = torch.empty([span.count for span in spans], dtype=self._dtype, device=self._device)
        self._read_into(out, name, spans)
        return out

    def _read_into(self, out: torch.Tensor, name: str, spans: tuple[Span, ...]) -> None:
        if self._fills:
            self._fill(out, name, spans)
        else:
            out.copy_(self._get(name, spans))
        self._note_extremes(name, out)

    def _fill(self, out: torch.Tensor, name: str, spans: tuple[Span, ...]) -> None:
        checkpoint, wanted = self._checkpoint, self._slices(spans)
        assert isinstance(checkpoint, DeviceTensors)
        whole = checkpoint.shape(name)
        sizes = [n if cut is None else len(range(n)[cut]) for n, cut in zip(whole, wanted, strict=False)]
        self._check_shape(name, (*sizes, *whole[len(sizes) :]), spans)
        checkpoint.fill(out, name, *wanted)
        self._count()

    def _get(self, name: str, spans: tuple[Span, ...]) -> torch.Tensor:
        tensor = self._checkpoint.get(name, *self._slices(spans))
        self._check_shape(name, tuple(tensor.shape), spans)
        self._count()
        return tensor

    def _slices(self, spans: tuple[Span, ...]) -> list[slice | None]:
        # A rank that holds all of a tensor asks for it unsliced: then its whole shape is what is checked.
        return [span.as_slice() if self._shard.world > 1 else None for span in spans]

    def _check_shape(self, name: str, found: tuple[int, ...], spans: tuple[Span, ...]) -> None:
        if found != (wanted := tuple(span.count for span in spans)):
            raise CheckpointError(f"{name} has shape {list(found)}, the configuration asks for {list(wanted)}")

    def _note_extremes(self, name: str, tensor: torch.Tensor) -> None:
        """To be looked at in the end: on a GPU a look waits for what was enqueued, and so would the reading."""
        self._extremes[name] = torch.stack(torch.aminmax(tensor))

    def _count(self) -> None:
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, self._num_tensors)


def _path(module: Module) -> str:
    return f"mlp.{module}" if module in (Module.GATE, Module.UP, Module.DOWN) else f"self_attn.{module}"


def _has_bias(spec: ModelSpec, module: Module) -> bool:
    match module:
        case Module.Q | Module.K | Module.V:
            return spec.qkv_bias
        case Module.O:
            return spec.o_bias
        case _:
            return spec.mlp_bias


def _expected_names(spec: ModelSpec) -> set[str]:
    names = {_EMBEDDING, "model.norm.weight"} | (set() if spec.tie_embeddings else {_HEAD})
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        names |= {f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"}
        if spec.qk_norm:
            names |= {f"{prefix}.self_attn.q_norm.weight", f"{prefix}.self_attn.k_norm.weight"}
        for module in Module:
            names.add(f"{prefix}.{_path(module)}.weight")
            if _has_bias(spec, module):
                names.add(f"{prefix}.{_path(module)}.bias")
    return names


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
