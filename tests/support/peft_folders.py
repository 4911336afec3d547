"""PEFT folders written by hand, sound ones and one for every kind of defect. Never imports the package under test.

The model that they are for has the shape of `tiny_models.SHAPE`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NUM_LAYERS = 3
MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position": 256,
}
"""The model that the folders are for, as fields of its description."""

WIDTHS = {
    "q_proj": (64, 64),
    "k_proj": (64, 32),
    "v_proj": (64, 32),
    "o_proj": (64, 64),
    "gate_proj": (64, 128),
    "up_proj": (64, 128),
    "down_proj": (128, 64),
}
"""Inputs and outputs of every module."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"


def module_of(layer: int, module: str) -> str:
    return (
        f"model.layers.{layer}.{'self_attn' if module in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{module}"
    )


def key_of(layer: int, module: str, half: str) -> str:
    """A tensor's name as PEFT writes it."""
    return f"base_model.model.{module_of(layer, module)}.lora_{half}.weight"


def make_tensors(
    ranks: dict[tuple[int, str], int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A and B of normal numbers for each (layer, module)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for (layer, module), rank in ranks.items():
        inputs, outputs = WIDTHS[module]
        for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[key_of(layer, module, half)] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


@dataclass(slots=True)
class Draft:
    """A folder before it is written; by default a sound adapter of rank 4 on q and v.

    Attributes:
        config: written as JSON; bytes are written as they are, None writes no file.
        after: what is done to the folder once it is written.
    """

    config: dict[str, Any] | bytes | None = field(
        default_factory=lambda: {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
    )
    tensors: dict[str, torch.Tensor] = field(
        default_factory=lambda: make_tensors({(l, m): 4 for l in range(NUM_LAYERS) for m in ("q_proj", "v_proj")})
    )
    after: list[Callable[[Path], object]] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            raw = self.config if isinstance(self.config, bytes) else json.dumps(self.config).encode()
            (folder / CONFIG).write_bytes(raw)
        save_file(self.tensors, folder / WEIGHTS)
        for change in self.after:
            change(folder)
        return folder


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing wrong with a sound folder.

    Attributes:
        spoil: makes it wrong.
        says: words that the problem must contain: the field or tensor, and the value.
    """

    spoil: Callable[[Draft], None]
    says: tuple[str, ...]


Q0A, Q0B = key_of(0, "q_proj", "A"), key_of(0, "q_proj", "B")


def _set(**fields: Any) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        assert isinstance(draft.config, dict)
        draft.config |= fields

    return spoil


def _unset(name: str) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        assert isinstance(draft.config, dict)
        del draft.config[name]

    return spoil


def _config(raw: bytes | None) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.config = raw

    return spoil


def _add(name: str, tensor: torch.Tensor) -> Callable[[Draft], None]:
    return lambda draft: draft.tensors.update({name: tensor})


def _drop(*names: str) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        for name in names:
            del draft.tensors[name]

    return spoil


def _edit(name: str, value: float) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.tensors[name][1, 2] = value

    return spoil


def _rename(old: str, new: str) -> Callable[[Draft], None]:
    def spoil(draft: Draft) -> None:
        draft.tensors = {name.replace(old, new): tensor for name, tensor in draft.tensors.items()}

    return spoil


def _after(change: Callable[[Path], object]) -> Callable[[Draft], None]:
    return lambda draft: draft.after.append(change)


def _file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Draft], None]:
    def rewrite(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return _after(rewrite)


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Draft], None]:
    """Rewrite the safetensors header; the data behind it stays."""

    def rewrite(raw: bytes) -> bytes:
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + size :]

    return _file(WEIGHTS, rewrite)


def _claim(name: str, field_name: str, value: Any) -> Callable[[Draft], None]:
    return _header(lambda header: header[name].__setitem__(field_name, value))


def shard(folder: Path) -> None:
    """Cut the weights in two files under an index, as large adapters are stored."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"adapter_model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def _sharded(change: Callable[[Path], object]) -> Callable[[Draft], None]:
    return lambda draft: draft.after.extend([shard, change])


def _index(change: Callable[[dict[str, str]], object]) -> Callable[[Draft], None]:
    def rewrite(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return _sharded(rewrite)


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Draft], None]:
    def rewrite(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return _after(rewrite)


def _pickle_instead(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'false'\ntR.")


DEFECTS: dict[str, Defect] = {
    # --- another method than plain LoRA ---
    "ia3": Defect(_set(peft_type="IA3"), ("peft_type", "LORA", "IA3")),
    "vera": Defect(_set(peft_type="VERA"), ("peft_type", "VERA")),
    "peft-type-missing": Defect(_unset("peft_type"), ("peft_type", "None")),
    "dora": Defect(_set(use_dora=True), ("use_dora=True", "DoRA")),
    "dora-tensors": Defect(
        _add("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.ones(64)),
        ("DoRA", "lora_magnitude_vector"),
    ),
    "lora-bias": Defect(_set(lora_bias=True), ("lora_bias=True",)),
    "lora-bias-tensors": Defect(_add(Q0B.replace(".weight", ".bias"), torch.ones(64)), ("lora_bias", "lora_B.bias")),
    "bias-all": Defect(_set(bias="all"), ("bias='all'",)),
    "alora": Defect(_set(alora_invocation_tokens=[1, 2]), ("alora_invocation_tokens=[1, 2]", "aLoRA")),
    "modules-to-save": Defect(_set(modules_to_save=["lm_head"]), ("modules_to_save=['lm_head']",)),
    "modules-to-save-tensors": Defect(
        _add("base_model.model.model.norm.modules_to_save.weight", torch.ones(64)), ("replace modules", "model.norm")
    ),
    "trainable-tokens": Defect(_set(trainable_token_indices=[5]), ("trainable_token_indices=[5]",)),
    "target-parameters": Defect(_set(target_parameters=["mlp.experts"]), ("target_parameters=['mlp.experts']",)),
    "layer-replication": Defect(_set(layer_replication=[[0, 2], [1, 3]]), ("layer_replication=[[0, 2], [1, 3]]",)),
    "pissa": Defect(_set(init_lora_weights="pissa"), ("init_lora_weights='pissa'",)),
    "pissa-niter": Defect(_set(init_lora_weights="pissa_niter_16"), ("init_lora_weights='pissa_niter_16'",)),
    "olora": Defect(_set(init_lora_weights="olora"), ("init_lora_weights='olora'",)),
    "corda": Defect(_set(init_lora_weights="corda"), ("init_lora_weights='corda'",)),
    "eva": Defect(_set(init_lora_weights="eva"), ("init_lora_weights='eva'",)),
    "loftq": Defect(_set(init_lora_weights="loftq"), ("init_lora_weights='loftq'",)),
    "init-of-a-wrong-type": Defect(_set(init_lora_weights=["x"]), ("init_lora_weights=['x']",)),
    "megatron": Defect(_set(megatron_config={"tp": 2}), ("megatron_config={'tp': 2}",)),
    "qalora": Defect(_set(use_qalora=True), ("use_qalora=True",)),
    "block-diagonal": Defect(_set(use_bdlora={"nblocks": 2}), ("use_bdlora={'nblocks': 2}",)),
    "fan-in-fan-out": Defect(_set(fan_in_fan_out=True), ("fan_in_fan_out=True",)),
    "unknown-field": Defect(_set(use_magic=0.5), ("unknown", "'use_magic'", "0.5")),
    "unknown-field-zero": Defect(_set(magic_index=0), ("unknown", "'magic_index'", "0")),
    # --- the vocabulary ---
    "lm-head-targeted": Defect(_set(target_modules=["q_proj", "v_proj", "lm_head"]), ("target_modules", "lm_head")),
    "embed-tokens-targeted": Defect(_set(target_modules=r".*(q_proj|v_proj|embed_tokens)"), ("embed_tokens",)),
    "lm-head-tensors": Defect(
        _add("base_model.model.lm_head.lora_A.weight", torch.ones(4, 64)), ("lm_head", "lm_head.lora_A.weight")
    ),
    "embedding-tensors": Defect(
        _add("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 256)), ("lora_embedding_A",)
    ),
    "base-layer": Defect(
        _add("base_model.model.lm_head.base_layer.weight", torch.ones(256, 64)),
        ("copy of the base", "base_layer.weight"),
    ),
    # --- the config file ---
    "config-missing": Defect(_config(None), (CONFIG, "missing")),
    "config-empty": Defect(_config(b""), (CONFIG, "not valid JSON")),
    "config-not-json": Defect(_config(b"{'r': 4}"), (CONFIG, "not valid JSON")),
    "config-not-utf8": Defect(_config(b'{"r": "\xff"}'), (CONFIG, "not valid JSON")),
    "config-a-list": Defect(_config(b"[1, 2]"), (CONFIG, "object", "[1, 2]")),
    "config-nested-deeply": Defect(_config(b'{"r":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), (CONFIG, "nested")),
    "config-huge": Defect(_config(b" " * (5 * 2**20) + b"{}"), (CONFIG, str(5 * 2**20 + 2))),
    "config-key-twice": Defect(_config(b'{"peft_type": "LORA", "r": 4, "r": 8}'), ("'r'", "twice")),
    "config-number-of-5000-digits": Defect(_config(b'{"r": ' + b"9" * 5000 + b"}"), (CONFIG, "not valid JSON")),
    "config-a-folder": Defect(_replace(CONFIG, Path.mkdir), (CONFIG, "folder")),
    "config-a-dangling-link": Defect(_replace(CONFIG, lambda p: p.symlink_to("nowhere")), (CONFIG, "link")),
    "config-a-link-to-itself": Defect(_replace(CONFIG, lambda p: p.symlink_to(p.name)), (CONFIG, "cannot be read")),
    "config-a-pipe": Defect(_replace(CONFIG, os.mkfifo), (CONFIG, "not a regular file")),
    # --- values of the config ---
    "r-zero": Defect(_set(r=0), ("r must be a whole number >= 1, got 0",)),
    "r-true": Defect(_set(r=True), ("r must be", "True")),
    "r-text": Defect(_set(r="4"), ("r must be", "'4'")),
    "r-fraction": Defect(_set(r=4.0), ("r must be", "4.0")),
    "r-null": Defect(_set(r=None), ("r must be", "None")),
    "r-huge": Defect(_set(r=10**30), ("rank 4", str(10**30))),
    "alpha-nan": Defect(_set(lora_alpha=float("nan")), ("lora_alpha", "nan")),
    "alpha-infinite": Defect(_set(lora_alpha=float("inf")), ("lora_alpha", "inf")),
    "alpha-huge": Defect(_set(lora_alpha=10**400), ("lora_alpha must be a finite number", "1000")),
    "alpha-true": Defect(_set(lora_alpha=True), ("lora_alpha", "True")),
    "alpha-text": Defect(_set(lora_alpha="8"), ("lora_alpha", "'8'")),
    "scale-beyond-float32": Defect(_set(lora_alpha=1e39), ("scale", "2.5e+38", "float32", "layer 0 q_proj")),
    "rslora-number": Defect(_set(use_rslora=1), ("use_rslora must be true or false, got 1",)),
    "rank-pattern-a-list": Defect(_set(rank_pattern=[4]), ("rank_pattern", "[4]")),
    "rank-pattern-zero": Defect(_set(rank_pattern={"q_proj": 0}), ("rank_pattern['q_proj']", "0")),
    "rank-pattern-true": Defect(_set(rank_pattern={"q_proj": True}), ("rank_pattern['q_proj']", "True")),
    "rank-pattern-no-regex": Defect(_set(rank_pattern={"(": 4}), ("rank_pattern", "'(", "regular expression")),
    "rank-pattern-of-a-billion-repeats": Defect(
        _set(rank_pattern={"x{999999999}": 4}), ("rank_pattern", "'x{999999999}'", "1000 repetitions")
    ),
    "rank-pattern-contradicts": Defect(_set(rank_pattern={"q_proj": 8}), ("rank 4", "8", "layer 0 q_proj")),
    "rank-contradicts": Defect(_set(r=16), ("rank 4", "16", "layer 0 q_proj")),
    "alpha-pattern-text": Defect(_set(alpha_pattern={"q_proj": "8"}), ("alpha_pattern['q_proj']", "'8'")),
    "alpha-pattern-infinite": Defect(_set(alpha_pattern={"q_proj": float("inf")}), ("alpha_pattern['q_proj']", "inf")),
    "targets-null": Defect(_set(target_modules=None), ("target_modules=None",)),
    "targets-missing": Defect(_unset("target_modules"), ("target_modules=None",)),
    "targets-empty": Defect(_set(target_modules=[]), ("target_modules=[]",)),
    "targets-a-number": Defect(_set(target_modules=5), ("target_modules", "5")),
    "targets-with-a-number": Defect(_set(target_modules=["q_proj", 5]), ("target_modules", "5")),
    "targets-no-regex": Defect(_set(target_modules="(q_proj"), ("target_modules", "'(q_proj'", "regular expression")),
    "targets-a-long-regex": Defect(_set(target_modules="(a|b)" * 5000), ("target_modules", "25000 characters")),
    "targets-a-recursive-regex": Defect(
        _set(target_modules="(?R)"), ("target_modules", "'(?R)'", "regular expression")
    ),
    "targets-of-another-model": Defect(_set(target_modules=["c_attn"]), ("target_modules", "no module")),
    "excluded-a-number": Defect(_set(exclude_modules=3), ("exclude_modules", "3")),
    "layers-negative": Defect(_set(layers_to_transform=[-1]), ("layers_to_transform", "[-1]")),
    "layers-true": Defect(_set(layers_to_transform=[True]), ("layers_to_transform", "[True]")),
    "layers-text": Defect(_set(layers_to_transform="0"), ("layers_to_transform", "'0'")),
    "layers-beyond": Defect(_set(layers_to_transform=[0, 1, 2, 7]), ("layers_to_transform", "7", "3")),
    "layers-beside-a-regex": Defect(
        _set(target_modules=".*(q_proj|v_proj)", layers_to_transform=[0]), ("target_modules", "layers_to_transform")
    ),
    "layers-pattern-alone": Defect(
        _set(layers_pattern="layers"), ("layers_pattern", "'layers'", "layers_to_transform")
    ),
    # --- tensors against config and model ---
    "tensors-for-no-such-layer": Defect(
        lambda d: d.tensors.update(make_tensors({(3, "q_proj"): 4})), ("3 layers", key_of(3, "q_proj", "A"))
    ),
    "tensors-for-no-such-module": Defect(
        _add("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", torch.ones(4, 64)),
        ("no module", "qkv_proj"),
    ),
    "tensors-under-the-wrong-parent": Defect(
        _add("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", torch.ones(4, 64)), ("no module", "mlp.q_proj")
    ),
    "tensors-not-targeted": Defect(_set(target_modules=["q_proj"]), ("does not select", "layer 0 v_proj")),
    "tensors-excluded": Defect(_set(exclude_modules=["v_proj"]), ("does not select", "layer 0 v_proj")),
    "tensors-missing-for-a-target": Defect(
        _set(target_modules=["q_proj", "v_proj", "k_proj"]), ("no tensors for", "layer 0 k_proj")
    ),
    "tensors-missing-for-a-layer": Defect(
        _drop(key_of(1, "q_proj", "A"), key_of(1, "q_proj", "B")), ("no tensors for", "layer 1 q_proj")
    ),
    "half-missing": Defect(_drop(Q0B), ("lora_B is missing", "layer 0 q_proj")),
    "other-half-missing": Defect(_drop(Q0A), ("lora_A is missing", "layer 0 q_proj")),
    "wrong-width": Defect(_add(Q0A, torch.ones(4, 65)), ("q_proj", "[rank, 64]", "[4, 65]")),
    "transposed": Defect(_add(Q0B, torch.ones(4, 64)), ("q_proj", "[64, rank]", "[4, 64]")),
    "one-dimensional": Defect(_add(Q0A, torch.ones(256)), ("q_proj", "[rank, 64]", "[256]")),
    "rank-zero": Defect(_add(Q0A, torch.ones(0, 64)), ("q_proj", "[rank, 64]", "[0, 64]")),
    "ranks-of-halves-differ": Defect(_add(Q0A, torch.ones(5, 64)), ("rank 5", "rank 4", "layer 0 q_proj")),
    "float64": Defect(_add(Q0A, torch.ones(4, 64, dtype=torch.float64)), ("F64", Q0A)),
    "int8": Defect(_add(Q0A, torch.ones(4, 64, dtype=torch.int8)), ("I8", Q0A)),
    "nan-in-a": Defect(_edit(Q0A, float("nan")), ("lora_A", "NaN", "layer 0 q_proj")),
    "nan-in-b": Defect(_edit(Q0B, float("nan")), ("lora_B", "NaN", "layer 0 q_proj")),
    "infinity-in-a": Defect(_edit(Q0A, float("inf")), ("lora_A", "infinite", "layer 0 q_proj")),
    "minus-infinity-in-b": Defect(_edit(Q0B, float("-inf")), ("lora_B", "infinite", "layer 0 q_proj")),
    "same-tensor-twice": Defect(
        _add(Q0A.replace("lora_A", "lora_A.default"), torch.ones(4, 64)), (Q0A, "lora_A.default.weight", "twice")
    ),
    "names-of-two-models": Defect(_rename("model.model.layers.1", "model.layers.1"), ("different models", "layers.1")),
    "layer-number-with-a-zero": Defect(_rename("layers.1.", "layers.01."), ("no module", "layers.01.")),
    "names-of-another-style": Defect(_rename("base_model.model.model.layers.", "lora_unet_blocks_"), ("no module",)),
    # --- the weights file ---
    "weights-missing": Defect(_after(lambda f: (f / WEIGHTS).unlink()), (WEIGHTS, "missing")),
    "no-tensors": Defect(lambda d: d.tensors.clear(), (WEIGHTS, "no tensors")),
    "weights-of-zero-bytes": Defect(_file(WEIGHTS, lambda raw: b""), (WEIGHTS, "0 bytes")),
    "weights-truncated": Defect(_file(WEIGHTS, lambda raw: raw[:-10]), (WEIGHTS, "truncated")),
    "weights-truncated-in-the-header": Defect(_file(WEIGHTS, lambda raw: raw[:100]), (WEIGHTS, "100 bytes")),
    "weights-too-long": Defect(_file(WEIGHTS, lambda raw: raw + b"\0"), (WEIGHTS, "false header")),
    "weights-no-safetensors": Defect(_file(WEIGHTS, lambda raw: b"GGUF" * 64), (WEIGHTS, "truncated")),
    "header-of-exabytes": Defect(_file(WEIGHTS, lambda raw: struct.pack("<Q", 2**62) + raw[8:]), (str(2**62),)),
    "header-not-json": Defect(_file(WEIGHTS, lambda raw: raw[:8] + b"x" + raw[9:]), (WEIGHTS, "not valid JSON")),
    "header-lies-about-a-shape": Defect(_claim(Q0A, "shape", [400, 64]), (Q0A, "[400, 64]")),
    "header-lies-about-a-dtype": Defect(_claim(Q0A, "dtype", "F16"), (Q0A, "F16")),
    "header-of-an-unknown-dtype": Defect(_claim(Q0A, "dtype", "F7"), (Q0A, "'F7'")),
    "header-with-a-negative-shape": Defect(_claim(Q0A, "shape", [-4, -64]), (Q0A, "[-4, -64]")),
    "header-with-a-true-shape": Defect(_claim(Q0A, "shape", [True, 64]), (Q0A, "[True, 64]")),
    "header-without-offsets": Defect(_header(lambda h: h[Q0A].pop("data_offsets")), (Q0A, "data_offsets")),
    "header-with-overlap": Defect(
        _header(lambda h: h[Q0A].__setitem__("data_offsets", h[key_of(1, "q_proj", "A")]["data_offsets"])), ("byte",)
    ),
    "header-names-one-tensor-fewer": Defect(_header(lambda h: h.pop(key_of(1, "v_proj", "A"))), ("gap",)),
    "pickle": Defect(_after(_pickle_instead), ("adapter_model.bin", "pickle")),
    "weights-a-folder": Defect(_replace(WEIGHTS, Path.mkdir), (WEIGHTS, "folder")),
    "weights-a-dangling-link": Defect(_replace(WEIGHTS, lambda p: p.symlink_to("nowhere")), (WEIGHTS, "link")),
    "weights-a-pipe": Defect(_replace(WEIGHTS, os.mkfifo), (WEIGHTS, "not a regular file")),
    # --- several weight files ---
    "shard-missing": Defect(
        _sharded(lambda f: (f / "adapter_model-00002-of-00002.safetensors").unlink()), ("00002-of-00002", "missing")
    ),
    "shard-outside-the-folder": Defect(
        _index(lambda m: m.update({Q0A: "../other.safetensors"})), (INDEX, "'../other.safetensors'")
    ),
    "shard-a-pickle": Defect(_index(lambda m: m.update({Q0A: "x.bin"})), (INDEX, "'x.bin'")),
    "index-names-a-missing-tensor": Defect(
        _index(lambda m: m.update({Q0A + "x": m[Q0A]})), (INDEX, "does not hold", Q0A + "x")
    ),
    "index-forgets-a-tensor": Defect(_index(lambda m: m.pop(Q0A)), (INDEX, "does not name", Q0A)),
    "index-without-a-map": Defect(_sharded(lambda f: (f / INDEX).write_bytes(b"{}")), (INDEX, "weight_map", "None")),
    "index-beside-a-single-file": Defect(_after(lambda f: (f / INDEX).write_bytes(b"{}")), ("both", WEIGHTS, INDEX)),
}
"""Every kind of defect by name. `Draft().write` after `spoil` gives a folder that must be refused."""


def write_defective(kind: str, folder: Path) -> Path:
    """A folder that is sound but for one defect."""
    draft = Draft()
    DEFECTS[kind].spoil(draft)
    return draft.write(folder)
