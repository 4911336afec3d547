"""Checkpoints against the libraries that wrote them: transformers' own GGUF loading, safetensors, numpy slices."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from interleaf.errors import CheckpointError, ModelRejected
from interleaf.model.spec import parse_spec
from interleaf.weights import Checkpoint, expect, open_checkpoint, resolve_model
from tests.support.gguf_oracle import read_once
from tests.support.tiny_models import FAMILIES, make_model, save_model


def everything(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.get(name) for name in checkpoint.names()}


# --- Hugging Face folders -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in one file."""
    return save_model(make_model("llama2-linear"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several shards."""
    make_model("llama2-linear").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    return tmp_path / "sharded"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_with_every_tensor_and_a_spec(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    checkpoint = open_checkpoint(str(save_model(model, tmp_path)))
    wanted = model.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    found = everything(checkpoint)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert checkpoint.dtype == torch.float32

    spec, attention = parse_spec(checkpoint.config, family), model.model.layers[0].self_attn
    assert (spec.q_size, spec.kv_size) == (attention.q_proj.out_features, attention.k_proj.out_features)
    assert spec.qkv_bias == (attention.k_proj.bias is not None)
    assert spec.o_bias == (attention.o_proj.bias is not None)
    assert spec.qk_norm == hasattr(attention, "q_norm")
    assert spec.sliding_window == getattr(model.config, "sliding_window", None)
    assert spec.rope.kind == model.config.rope_parameters["rope_type"]
    assert spec.tie_embeddings == model.config.tie_word_embeddings
    assert spec.eos_token_ids == (2,)


def test_shards_hold_what_the_single_file_holds(tiny: Path, sharded: Path) -> None:
    single, parts = everything(open_checkpoint(str(tiny))), everything(open_checkpoint(str(sharded)))
    assert single.keys() == parts.keys()
    assert all(torch.equal(single[name], parts[name]) for name in single)


def test_rows_and_columns_are_cut_as_torch_cuts_them(tiny: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint, whole = open_checkpoint(str(tiny)), load_file(tiny / "model.safetensors")[name]
    assert torch.equal(checkpoint.get(name, rows=slice(8, 24)), whole[8:24])
    assert torch.equal(checkpoint.get(name, cols=slice(64, 128)), whole[:, 64:128])
    assert torch.equal(checkpoint.get(name, slice(0, 1), slice(127, 128)), whole[:1, 127:])
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(checkpoint.get(norm, rows=slice(3, 9)), load_file(tiny / "model.safetensors")[norm][3:9])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_whatever_the_configuration_says(copy: Path, dtype: torch.dtype) -> None:
    tensors = {name: t.to(dtype) for name, t in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    checkpoint = open_checkpoint(str(copy))
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.dtype == dtype
    assert all(torch.equal(checkpoint.get(name), tensors[name]) for name in tensors)


def test_end_tokens_of_generation_config_reach_the_spec(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert parse_spec(open_checkpoint(str(copy)).config, "tiny").eos_token_ids == (2, 7)


def test_expect_names_the_tensor_and_both_shapes(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny))
    assert expect(checkpoint, "model.norm.weight", (64,)).shape == (64,)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[64\].*\[65\]"):
        expect(checkpoint, "model.norm.weight", (65,))


def test_a_missing_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(str(tiny)).get("model.layers.9.mlp.up_proj.weight")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: is missing"):
        open_checkpoint(str(sharded))


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.7.extra.weight"] = index["weight_map"]["model.norm.weight"]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.extra\.weight is missing"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/outside.safetensors", "sub/inside.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(sharded: Path, file: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(copy: Path, keep: int) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a whole safetensors file"):
        open_checkpoint(str(copy))


def rewrite_header(file: Path, change: dict[str, Any]) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "lie", [{"shape": [65]}, {"dtype": "F16"}, {"data_offsets": [0, 10**12]}, {"data_offsets": [8, 4]}], ids=str
)
def test_a_header_that_lies_is_refused(copy: Path, lie: dict[str, Any]) -> None:
    rewrite_header(copy / "model.safetensors", {})
    open_checkpoint(str(copy)).close()  # rewriting as such does no harm
    rewrite_header(copy / "model.safetensors", lie)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a whole safetensors file"):
        open_checkpoint(str(copy))


def test_a_tensor_of_an_unsupported_type_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is kept as F8_E4M3"):
        open_checkpoint(str(copy)).get("model.norm.weight")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"has pytorch_model\.bin but no safetensors; pickled weights are not read"),
        ("model.Q4_0.gguf", r"to use model\.Q4_0\.gguf, give its own path"),
        ("readme.md", r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_a_folder_without_safetensors_says_what_is_there_instead(copy: Path, file: str, message: str) -> None:
    (copy / "model.safetensors").rename(copy / file)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(copy))


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")])
def test_a_malformed_configuration_is_named(copy: Path, text: str, message: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        open_checkpoint(str(copy))


def test_a_folder_without_configuration_is_refused(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(str(copy))


# --- paths and the hub ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", "no-such-folder", "/no/such/folder", "a/b/c", "models/none.gguf"])
def test_a_path_that_does_not_exist_is_refused_without_the_network(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or folder|has no config"):
        open_checkpoint(model)


def test_a_hub_id_that_cannot_be_had_says_so() -> None:
    with pytest.raises(
        CheckpointError, match=r"^nobody/no-such-model: no such path, and it cannot be had from the hub"
    ):
        resolve_model("nobody/no-such-model")


def test_a_format_that_does_not_fit_is_refused(tiny: Path, smollm2_gguf: Path) -> None:
    with pytest.raises(CheckpointError, match="load_format='gguf'"):
        open_checkpoint(str(tiny), load_format="gguf")
    with pytest.raises(CheckpointError, match="load_format='safetensors'"):
        open_checkpoint(str(smollm2_gguf), load_format="safetensors")


# --- GGUF -----------------------------------------------------------------------------------------------------------


def test_every_tensor_of_the_built_in_model_is_bit_equal_to_transformers_loading(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    spec = parse_spec(checkpoint.config, "built-in")
    with torch.device("meta"):  # transformers takes the names from a model of the right shape
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, hidden_size=576, num_attention_heads=9))
    with read_once():
        loaded = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=names)
    wanted = loaded["tensors"]
    assert len(wanted) == 272
    assert checkpoint.names() == wanted.keys()
    assert [name for name in wanted if not torch.equal(checkpoint.get(name), wanted[name])] == []

    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
        cut = checkpoint.get(name, rows=slice(64, 192), cols=slice(40, 300))
        assert torch.equal(cut, wanted[name][64:192, 40:300])

    assert checkpoint.dtype == torch.float32
    assert spec == parse_spec(LlamaConfig(**loaded["config"]).to_dict(), "built-in")


def write_gguf(
    path: Path, *, dtype: Any = np.float32, architecture: str = "llama", **extra: Any
) -> dict[str, np.ndarray]:
    """A one-layer Llama of 8 hidden units, 2 heads and 1 KV head; returns its tensors under llama.cpp's names."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(5)
    writer.add_context_length(32)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in extra.pop("metadata", {}).items():
        {int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}[type(value)](key, value)
    matrices = {"token_embd": (10, 8), "output": (10, 8), "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8)}
    matrices |= {"blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_gate": (16, 8)}
    matrices |= {"blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)} | extra.pop("tensors", {})
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(dtype) for name, shape in matrices.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        tensors[f"{name}.weight"] = rng.normal(size=8).astype(np.float32)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_half_precision_gguf_file_keeps_its_type_and_its_untied_head(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", dtype=np.float16)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.dtype == torch.float16
    assert not parse_spec(checkpoint.config, "m").tie_embeddings
    assert np.array_equal(checkpoint.get("lm_head.weight").numpy(), tensors["output.weight"].astype(np.float32))
    # llama.cpp turns rows (0, 1) and (2, 3) of a head of 4 as pairs, Hugging Face rows (0, 2) and (1, 3).
    q, k = tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"]
    found_q = checkpoint.get("model.layers.0.self_attn.q_proj.weight").numpy()
    assert np.array_equal(found_q, q[[0, 2, 1, 3, 4, 6, 5, 7]].astype(np.float32))
    found_k = checkpoint.get("model.layers.0.self_attn.k_proj.weight", rows=slice(1, 3)).numpy()
    assert np.array_equal(found_k, k[[2, 1]].astype(np.float32))


def test_linear_rope_scaling_is_read_from_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    rope = parse_spec(open_checkpoint(str(tmp_path / "m.gguf")).config, "m").rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count=8"),
        ({"metadata": {"llama.attention.sliding_window": 512}}, "llama.attention.sliding_window=512"),
        ({"metadata": {"llama.rope.dimension_count": 2}}, "llama.rope.dimension_count=2"),
        ({"metadata": {"llama.logit_scale": 0.5}}, "llama.logit_scale=0.5"),
        ({"tensors": {"rope_freqs": (2, 1)}}, "tensor rope_freqs.weight"),
        ({"tensors": {"blk.0.ffn_gate_inp": (8, 8)}}, "tensor blk.0.ffn_gate_inp.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_gguf_file_asks_for_beyond_a_plain_llama_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelRejected) as caught:
        open_checkpoint(str(tmp_path / "m.gguf"))
    (found,) = caught.value.problems
    assert problem in found


@pytest.mark.parametrize("keep", [0, 3, 40, 300, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes().rstrip(b"\0")  # padding at the end is not missed
    (tmp_path / "m.gguf").write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf: is not a whole GGUF file"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_one_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(str(tmp_path / "m.gguf"))


# --- random weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_have_the_names_and_shapes_of_the_real_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    for source in (tmp_path, tmp_path / "config.json"):
        found = everything(open_checkpoint(str(source), load_format="dummy"))
        assert {name: tuple(t.shape) for name, t in found.items()} == wanted


def test_dummy_weights_depend_on_seed_and_name_and_not_on_order_or_slices(tiny: Path) -> None:
    def dummy(seed: int) -> Checkpoint:
        return open_checkpoint(str(tiny), load_format="dummy", seed=seed)

    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    one, other = dummy(1), dummy(1)
    first, second = one.get(q), one.get(k)
    assert torch.equal(other.get(k), second)
    assert torch.equal(other.get(q, rows=slice(16, 32), cols=slice(1, 5)), first[16:32, 1:5])
    assert not torch.equal(first, second)
    assert not torch.equal(dummy(2).get(q), first)


def test_dummy_weights_keep_logits_sane(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny), load_format="dummy", seed=3)
    model = make_model("llama2-linear")
    model.load_state_dict(everything(checkpoint))
    with torch.inference_mode():
        logits = model(torch.arange(64)[None]).logits
    assert 0.3 < logits.std() < 3.0


def test_dummy_weights_without_a_size_name_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        open_checkpoint(str(tmp_path), load_format="dummy").names()
