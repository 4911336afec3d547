"""A decoder of the Llama family: the order of its layers, and how a checkpoint fills them. Knows no request, no page.

h = embed(tokens)
per layer:  h += o(attention(rope(qkv(norm(h)))))      each product once for the whole batch, whatever its rows'
            h += down(swiglu(gate_up(norm(h))))        adapters; after it the adapters of those rows that have one
logits = head(norm(h)) for the rows that are sampled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from interleaf.attention import StepAttention
from interleaf.core import LoraGroup, ModelSpec
from interleaf.kernels import LoraWork, lora_add
from interleaf.model.layers import Linear, RmsNorm, swiglu
from interleaf.model.loading import NamedTensors, TensorReader
from interleaf.model.rope import Rope, rotate
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

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    o: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Transformer:
    """One rank's share of a model. Holds weights only: all state is in the batch and the pool."""

    def __init__(
        self,
        shard: Shard,
        embed: torch.Tensor,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = shard.spec
        self.dtype = dtype
        self.device = device
        self.layers = layers
        self.norm = norm
        self.head = head
        self._embed = embed
        self._q_heads = shard.heads.count
        self._kv_heads = shard.kv_heads.count
        self._rope = Rope(shard.spec.rope, shard.spec.head_dim, dtype, device)

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

        Raises: CheckpointError: a tensor is missing, left over, or of another shape; it is named.
        """
        assert shard.world == 1, "o and down are partial sums on each of several ranks: forward must reduce them"
        device = torch.device(device)
        reader = TensorReader(spec, shard, checkpoint, dtype, device, progress)
        embed = reader.embedding()
        layers = [
            DecoderLayer(
                input_norm=RmsNorm(reader.norm(f"model.layers.{i}.input_layernorm.weight"), spec.rms_norm_eps),
                qkv=Linear(*reader.group(i, LoraGroup.QKV)),
                qk_norm=RmsNorm(reader.qk_norm(i), spec.rms_norm_eps) if spec.qk_norm else None,
                o=Linear(*reader.group(i, LoraGroup.O)),
                mlp_norm=RmsNorm(reader.norm(f"model.layers.{i}.post_attention_layernorm.weight"), spec.rms_norm_eps),
                gate_up=Linear(*reader.group(i, LoraGroup.GATE_UP)),
                down=Linear(*reader.group(i, LoraGroup.DOWN)),
            )
            for i in range(spec.num_layers)
        ]
        norm = RmsNorm(reader.norm("model.norm.weight"), spec.rms_norm_eps)
        return cls(shard, embed, layers, norm, Linear(reader.head(embed)), dtype, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Compute one step.

        Args: pool: the whole pool's tensor, where the adapters of `batch.lora` lie.
        Returns: logits of the sampled rows, [S, vocabulary], in the model's dtype.
        """
        q_heads, heads, head_dim = self._q_heads, self._q_heads + self._kv_heads, self.spec.head_dim
        lora, attention = batch.lora, batch.attention
        angles = self._rope.angles(batch.positions)
        h = embedding(batch.token_ids, self._embed)
        for i, layer in enumerate(self.layers):
            x = layer.input_norm(h)
            qkv = layer.qkv(x)
            if lora is not None:
                lora_add(x, qkv, pool, lora, LoraGroup.QKV, i)
            qkv = qkv.view(qkv.shape[0], -1, head_dim)
            qk = qkv[:, :heads]
            if layer.qk_norm is not None:
                qk = layer.qk_norm(qk)
            qk = rotate(qk, angles)
            x = attention.forward(i, qk[:, :q_heads], qk[:, q_heads:], qkv[:, heads:])
            y = layer.o(x)
            if lora is not None:
                lora_add(x, y, pool, lora, LoraGroup.O, i)
            h += y

            x = layer.mlp_norm(h)
            gate_up = layer.gate_up(x)
            if lora is not None:
                lora_add(x, gate_up, pool, lora, LoraGroup.GATE_UP, i)
            x = swiglu(gate_up)
            y = layer.down(x)
            if lora is not None:
                lora_add(x, y, pool, lora, LoraGroup.DOWN, i)
            h += y
        if batch.sampled is not None:
            h = h.index_select(0, batch.sampled)
        return self.head(self.norm(h))
