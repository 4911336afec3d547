"""A decoder of the Llama family: the order of its layers, and how a checkpoint fills them. Knows no request, no page.

h = embed(tokens)
per layer:  h += o(attention(qkv(norm(h))))            each product once for the whole batch, whatever its rows'
            h += down(swiglu(gate_up(norm(h))))        adapters; after it the adapters of those rows that have one
logits = head(norm(h)) for the rows that are sampled

An addition to h and the norm behind it are one op, across the border of two layers. On a GPU in 16 bits a layer is nine
kernels: add and norm, qkv, rotary with KV write, attention (where few long sequences are split, another merges their
parts), o, add and norm, gate_up, swiglu, down; norms of q and k would be a tenth. LoRA comes on top, and once per step
embedding, angles, page lists, the first norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from interleaf.attention import StepAttention
from interleaf.core import LoraGroup, ModelSpec
from interleaf.kernels import LoraWork, lora_add
from interleaf.kernels.rotary import RopeAngles
from interleaf.model.layers import Linear
from interleaf.model.loading import NamedTensors, TensorReader
from interleaf.model.ops import HeadNorm, Norm, RowOps, choose_row_ops
from interleaf.model.rope import Rope
from interleaf.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, as the model sees them.

    Attributes:
        token_ids, positions: [T] int64.
        attention: reads and writes the rows' KV.
        sampled: [S] int64 rows whose logits are wanted; None = all of them.
        lora: which rows use which adapter; None if none does, and then no LoRA op is called.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: StepAttention
    sampled: torch.Tensor | None = None
    lora: LoraWork | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer on this rank.

    Attributes:
        qk_norm: over all q heads, then all k heads; None where the family has none.
    """

    input_norm: Norm
    qkv: Linear
    qk_norm: HeadNorm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Transformer:
    """One rank's share of a model. Holds weights only: all state is in the batch and the pool."""

    def __init__(
        self,
        shard: Shard,
        embed: torch.Tensor,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device,
        row_ops: RowOps,
    ) -> None:
        self.spec = shard.spec
        self.shard = shard
        self.dtype = dtype
        self.device = device
        self.layers = layers
        self.norm = norm
        self.head = head
        self._embed = embed
        self._qk_heads = shard.heads.count + shard.kv_heads.count
        self._swiglu = row_ops.swiglu
        self._rope = Rope(shard.spec.rope, shard.spec.head_dim, dtype, device, row_ops)

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        shard: Shard,
        checkpoint: NamedTensors,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Transformer:
        """Read this rank's slices of every tensor.

        Args:
            dtype: of the weights and of everything computed.
            progress: called with (tensors read, tensors in all) after each.

        Raises: CheckpointError: a tensor is missing, left over, of another shape or not finite in `dtype`; it is named.
        """
        assert shard.world == 1, "o and down are partial sums on each of several ranks: forward must reduce them"
        device = torch.device(device)
        row_ops, eps = choose_row_ops(device, dtype), spec.rms_norm_eps
        reader = TensorReader(spec, shard, checkpoint, dtype, device, progress)
        embed = reader.embedding()
        layers = [
            DecoderLayer(
                input_norm=row_ops.norm(reader.norm(f"model.layers.{i}.input_layernorm.weight"), eps),
                qkv=Linear(*reader.group(i, LoraGroup.QKV)),
                qk_norm=row_ops.head_norm(reader.qk_norm(i), eps) if spec.qk_norm else None,
                o=Linear(*reader.group(i, LoraGroup.O)),
                mlp_norm=row_ops.norm(reader.norm(f"model.layers.{i}.post_attention_layernorm.weight"), eps),
                gate_up=Linear(*reader.group(i, LoraGroup.GATE_UP)),
                down=Linear(*reader.group(i, LoraGroup.DOWN)),
            )
            for i in range(spec.num_layers)
        ]
        norm = row_ops.norm(reader.norm("model.norm.weight"), eps)
        head = Linear(reader.head(embed))
        reader.require_finite()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # whatever stream computes finds them there
        return cls(shard, embed, layers, norm, head, dtype, device, row_ops)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Compute one step.

        Args: pool: the whole pool's tensor, where the adapters of `batch.lora` lie.
        Returns: logits of the sampled rows, [S, vocabulary], in the model's dtype.
        """
        lora, attention = batch.lora, batch.attention
        angles = self.angles(batch.positions)
        h = self.embed(batch.token_ids)
        found = self.first_qkv(h, pool, lora)
        for i in range(len(self.layers)):
            found = self.after_attention(i, attention.forward(i, found, angles), h, pool, lora)
        return self.logits(found, h, batch.sampled)

    # ------------------------------------------------------------------ what `forward` is made of, between attentions

    def angles(self, positions: torch.Tensor) -> RopeAngles:
        """The rotations of rows.   Args: positions: [T] int64."""
        return self._rope.angles(positions)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """h, the residual stream: [T, hidden].   Args: token_ids: [T] int64."""
        return embedding(token_ids, self._embed)

    def first_qkv(self, h: torch.Tensor, pool: torch.Tensor, lora: LoraWork | None) -> torch.Tensor:
        """q, k and v of layer 0, not rotated: [T, heads + 2 * kv_heads, head_dim]."""
        return self._qkv(0, self.layers[0].input_norm(h), pool, lora)

    def after_attention(
        self, i: int, x: torch.Tensor, h: torch.Tensor, pool: torch.Tensor, lora: LoraWork | None
    ) -> torch.Tensor:
        """The rest of layer i, and the next layer up to its attention.

        Args:
            x: [T, heads * head_dim], what layer i's attention found.
            h: [T, hidden]; changed in place.
        Returns: q, k and v of layer i + 1; behind the last layer what is still to be added to h, [T, hidden].
        """
        layer = self.layers[i]
        y = layer.o(x)
        if lora is not None:
            lora_add(x, y, pool, lora, LoraGroup.O, i)
        x = layer.mlp_norm.add(y, h)
        gate_up = layer.gate_up(x)
        if lora is not None:
            lora_add(x, gate_up, pool, lora, LoraGroup.GATE_UP, i)
        x = self._swiglu(gate_up)
        y = layer.down(x)
        if lora is not None:
            lora_add(x, y, pool, lora, LoraGroup.DOWN, i)
        if i + 1 == len(self.layers):
            return y
        return self._qkv(i + 1, self.layers[i + 1].input_norm.add(y, h), pool, lora)

    def logits(self, y: torch.Tensor, h: torch.Tensor, sampled: torch.Tensor | None) -> torch.Tensor:
        """Logits of the sampled rows, [S, vocabulary]; None = of all.   Args: y: what is still to be added to h."""
        if sampled is not None:
            y, h = y.index_select(0, sampled), h.index_select(0, sampled)
        return self.head(self.norm.add(y, h))

    def _qkv(self, i: int, x: torch.Tensor, pool: torch.Tensor, lora: LoraWork | None) -> torch.Tensor:
        layer = self.layers[i]
        qkv = layer.qkv(x)
        if lora is not None:
            lora_add(x, qkv, pool, lora, LoraGroup.QKV, i)
        qkv = qkv.view(qkv.shape[0], -1, self.spec.head_dim)
        if layer.qk_norm is not None:
            layer.qk_norm.in_place(qkv[:, : self._qk_heads])
        return qkv
