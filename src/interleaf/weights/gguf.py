"""A Llama model's GGUF file as a checkpoint: its tensors under Hugging Face's names. Knows nothing of tokenizers.

The `gguf` library dequantises. What is undone here is llama.cpp's own: its tensor names, and the order of
q and k rows (it rotates neighbouring pairs, Hugging Face rotates halves of a head).

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from interleaf.errors import CheckpointError, ModelRejected
from interleaf.weights.gguf_file import GgufFile

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Metadata under "llama.", and the config.json field that it becomes (None: read below, or without effect).
_FIELDS = {
    "vocab_size": None,
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": None,
    "rope.dimension_count": None,
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": None,
    "rope.scaling.factor": None,
}
# Present in some files with a value that means nothing.
_INERT = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.finetuned": False}


class GgufCheckpoint:
    """The tensors of one GGUF file, dequantised as they are read.

    Quantisation runs along rows, so only the rows asked for are dequantised; columns are cut afterwards.

    Raises:
        CheckpointError: the file cannot be read, or lacks metadata.
        ModelRejected: the architecture, or something that the file says of it, is not supported.
    """

    def __init__(self, path: Path) -> None:
        file = GgufFile(path)
        tensors = file.tensors()
        named = {name: canonical_name(name) for name in tensors}
        self.config: Mapping[str, Any] = _config(file, [name for name, known in named.items() if known is None])
        self._tensors = {known: tensors[name] for name, known in named.items() if known is not None}
        self.dtype = _own_dtype(self._tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def get(self, name: str, rows: slice | None = None, cols: slice | None = None) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        source = self._tensors[name]
        data = source.data
        if ".q_proj." in name or ".k_proj." in name:
            heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            data = data[_rows_by_halves(len(data), heads)[rows or slice(None)]]
        elif rows is not None:
            data = data[rows]
        try:
            values = gguf.dequantize(data, source.tensor_type)
        except NotImplementedError as e:
            raise CheckpointError(f"tensor {name}: {source.tensor_type.name} cannot be dequantised") from e
        # Unquantised tensors come back as views of the mapped file, which torch must not be able to write to.
        return torch.from_numpy(np.array(values if cols is None else values[:, cols], dtype=np.float32, order="C"))

    def close(self) -> None:
        self._tensors.clear()


def canonical_name(name: str) -> str | None:
    """Hugging Face's name of a tensor that llama.cpp calls `name`; None if the Llama family has no such tensor."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None
    part, _, kind = name.rpartition(".")
    return f"{_OUTER_NAMES[part]}.weight" if part in _OUTER_NAMES and kind == "weight" else None


def _rows_by_halves(num_rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """For each row of Hugging Face's q or k, the row of llama.cpp's: a head's even rows, then its odd ones."""
    if num_rows % (2 * heads):
        raise CheckpointError(f"q or k has {num_rows} rows, which are no even number for each of {heads} heads")
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _config(file: GgufFile, unknown_tensors: list[str]) -> dict[str, Any]:
    """The metadata as the fields of a config.json. Raises: ModelRejected: lists everything that is not supported."""
    architecture = file.get("general.architecture")
    if architecture != "llama":
        raise ModelRejected(str(file.path), [f"architecture {architecture!r} is not supported from GGUF, only 'llama'"])
    meta = file.with_prefix("llama.")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: meta[key] for key, name in _FIELDS.items() if name is not None and key in meta},
    }
    missing = [key for key in ("embedding_length", "attention.head_count") if not isinstance(meta.get(key), int)]
    if missing:
        raise CheckpointError(f"{file.path}: lacks llama.{', llama.'.join(missing)}")
    head_dim = config.setdefault("head_dim", meta["embedding_length"] // meta["attention.head_count"])
    config.setdefault("num_key_value_heads", meta["attention.head_count"])

    tensors = file.tensors()
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if (scaling := meta.get("rope.scaling.type", "none")) != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": meta.get("rope.scaling.factor")}
    config["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id")
    ends = (file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))

    problems = [
        f"llama.{key}={meta[key]} is not supported"
        for key in meta
        if key not in _FIELDS and _INERT.get(key) != meta[key]
    ]
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            problems.append(f"llama.{key}={meta[key]} differs from the head's {head_dim}, which is not supported")
    problems += [f"tensor {name} is not supported" for name in unknown_tensors]
    if problems:
        raise ModelRejected(str(file.path), problems)
    return config


def _own_dtype(tensors: Mapping[str, gguf.ReaderTensor]) -> torch.dtype:
    # Norms are kept in float32 whatever the matrices are in, so the matrices decide.
    kinds = {t.tensor_type for t in tensors.values() if len(t.shape) > 1}
    if kinds == {gguf.GGMLQuantizationType.F16}:
        return torch.float16
    if kinds == {gguf.GGMLQuantizationType.BF16}:
        return torch.bfloat16
    return torch.float32
