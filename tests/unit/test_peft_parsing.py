"""What PEFT folders may hold is read as it is meant: names, fields, shards, identity. Outputs: tests/reference."""

import dataclasses
import hashlib
import itertools
import json
import math
import struct

import pytest
import torch

from interleaf.adapters.peft import parse_folder
from interleaf.adapters.safetensors_file import open_safetensors
from interleaf.core import ModelSpec, Module
from interleaf.errors import AdapterRejected
from tests.support.peft_folders import (
    CONFIG,
    MODEL,
    NUM_LAYERS,
    WEIGHTS,
    WIDTHS,
    Draft,
    key_of,
    make_tensors,
    module_of,
    shard,
)

SPEC = ModelSpec(**MODEL)
EVERYWHERE = [(layer, module) for layer in range(NUM_LAYERS) for module in WIDTHS]


def draft_of(ranks, **fields):
    draft = Draft(tensors=make_tensors(ranks))
    draft.config |= fields
    return draft


def parse(draft, folder):
    return parse_folder(draft.write(folder), SPEC)


def test_every_tensor_arrives_as_it_is_stored(tmp_path):
    draft = draft_of(dict.fromkeys(EVERYWHERE, 4), target_modules=list(WIDTHS))
    parsed = parse(draft, tmp_path)
    assert set(parsed.pairs) == set(EVERYWHERE)
    for (layer, module), pair in parsed.pairs.items():
        assert torch.equal(pair.a, draft.tensors[key_of(layer, module, "A")])
        assert torch.equal(pair.b, draft.tensors[key_of(layer, module, "B")])
        assert pair.scale == 2.0


@pytest.mark.parametrize("rank", [1, 3, 6, 100])
def test_any_rank_is_read(tmp_path, rank):
    parsed = parse(
        draft_of({at: rank for at in EVERYWHERE if at[1] == "o_proj"}, r=rank, target_modules=["o_proj"]), tmp_path
    )
    assert set(parsed.ranks.values()) == {rank}
    assert parsed.pairs[0, Module.O].scale == 8 / rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept(tmp_path, dtype):
    draft = Draft()
    draft.tensors = {name: tensor.to(dtype) for name, tensor in draft.tensors.items()}
    pair = parse(draft, tmp_path).pairs[2, Module.V]
    assert pair.a.dtype == pair.b.dtype == dtype
    assert torch.equal(pair.b, draft.tensors[key_of(2, "v_proj", "B")])


def test_each_tensor_may_have_a_dtype_of_its_own(tmp_path):
    draft, dtypes = Draft(), itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    draft.tensors = {name: tensor.to(next(dtypes)) for name, tensor in draft.tensors.items()}
    pairs = parse(draft, tmp_path).pairs
    for (layer, module), pair in pairs.items():
        for half, tensor in (("A", pair.a), ("B", pair.b)):
            stored = draft.tensors[key_of(layer, module, half)]
            assert tensor.dtype == stored.dtype
            assert torch.equal(tensor, stored)
    draft.tensors[key_of(2, "v_proj", "B")][3, 1] = math.nan
    with pytest.raises(AdapterRejected, match=r"lora_B holds NaN or infinite values: layer 2 v_proj$"):
        parse(draft, tmp_path)


def test_tensors_that_begin_at_odd_bytes_are_read(tmp_path):
    folder = Draft().write(tmp_path)
    raw = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    for entry in header.values():  # of float32, behind two bytes of float16
        entry["data_offsets"] = [offset + 2 for offset in entry["data_offsets"]]
    header["odd"] = {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]}
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0" + data)
    file = open_safetensors(folder / WEIGHTS)
    whole = file.read_all()
    assert whole is not None
    for name, tensor in Draft().tensors.items():
        assert torch.equal(whole[0][name], tensor)
        assert whole[0][name].data_ptr() % 4 == 0
        assert torch.equal(file.read(name), tensor)


def test_a_bound_for_the_whole_adapter_refuses_no_part_of_it(tmp_path):
    # The largest of A times the scale is beyond float32, but it is B that is scaled.
    draft = Draft()
    draft.tensors[key_of(1, "q_proj", "A")][0, 0] = 3e38
    draft.config["lora_alpha"] = 400
    assert parse(draft, tmp_path).pairs[1, Module.Q].scale == 100
    draft.tensors[key_of(1, "q_proj", "B")][0, 0] = 3e37
    with pytest.raises(AdapterRejected, match=r"lora_B times the scale 100 is beyond float32: layer 1 q_proj$"):
        parse(draft, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".lora_A.", ".lora_A.default."),
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "language_model."),
    ],
)
def test_unambiguous_names_are_understood(tmp_path, old, new):
    plain = parse(Draft(), tmp_path / "plain")
    draft = Draft()
    draft.tensors = {name.replace(old, new): tensor for name, tensor in draft.tensors.items()}
    assert parse(draft, tmp_path / "other").uid == plain.uid


def test_lora_down_and_lora_up_are_a_and_b(tmp_path):
    draft = Draft()
    draft.tensors = {
        name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
        for name, tensor in draft.tensors.items()
    }
    assert parse(draft, tmp_path / "other").uid == parse(Draft(), tmp_path / "plain").uid


def test_shards_are_read_as_one_file(tmp_path):
    draft = Draft(after=[shard])
    assert parse(draft, tmp_path / "shards").uid == parse(Draft(), tmp_path / "single").uid


def test_links_to_files_are_followed(tmp_path):
    real = Draft().write(tmp_path / "real")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in real.iterdir():
        (linked / file.name).symlink_to(file)
    assert parse_folder(linked, SPEC).uid == parse_folder(real, SPEC).uid


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        {"target_modules": [module_of(l, m) for l in range(NUM_LAYERS) for m in ("q_proj", "v_proj")]},
        {"target_modules": ["self_attn.q_proj", "v_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": "ALL-LINEAR", "exclude_modules": r".*(k_proj|o_proj|mlp\..*)"},
        {"layers_to_transform": [0, 1, 2]},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
        {"layers_to_transform": [], "layers_pattern": [], "exclude_modules": []},
        {"r": 99, "rank_pattern": {"(q|v)_proj": 4}},
        {"lora_alpha": 5, "alpha_pattern": {"v_proj": 8, "layers.[0-9].self_attn.q_proj": 8.0}},
        {"use_rslora": True, "lora_alpha": 4},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "base_model_name_or_path": "x/y", "revision": "main"},
        {"some_new_field": None, "another": False, "third": [], "fourth": {}, "fifth": ""},
        {"corda_config": {"rank": 4}, "megatron_core": "megatron.core", "qalora_group_size": 16},
    ],
)
def test_configs_of_equal_meaning_give_one_uid(tmp_path, fields):
    draft = Draft()
    draft.config |= fields
    assert parse(draft, tmp_path / "other").uid == parse(Draft(), tmp_path / "plain").uid


def test_the_uid_does_not_depend_on_the_order_of_tensors(tmp_path):
    draft = Draft()
    draft.tensors = dict(reversed(draft.tensors.items()))
    assert parse(draft, tmp_path / "other").uid == parse(Draft(), tmp_path / "plain").uid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_uid_is_the_digest_that_is_documented(tmp_path, dtype):
    draft = Draft()
    draft.tensors = {name: tensor.to(dtype) for name, tensor in draft.tensors.items()}
    sha = hashlib.sha256(b"interleaf lora v1\n")
    for layer in range(NUM_LAYERS):
        for module in ("q_proj", "v_proj"):
            sha.update(f"{layer} {module} {(2.0).hex()}\n".encode())
            for half in "AB":
                tensor = draft.tensors[key_of(layer, module, half)]
                sha.update(f"{dtype} {tuple(tensor.shape)}\n".encode())
                sha.update(bytes(tensor.view(torch.uint8).flatten().tolist()))
    assert parse(draft, tmp_path).uid == sha.hexdigest()


def test_whatever_changes_the_answer_changes_the_uid(tmp_path):
    uids = {"plain": parse(Draft(), tmp_path / "plain").uid}
    for name, fields in {"alpha": {"lora_alpha": 9}, "rslora": {"use_rslora": True}}.items():
        draft = Draft()
        draft.config |= fields
        uids[name] = parse(draft, tmp_path / name).uid
    draft = Draft()
    draft.tensors[key_of(1, "v_proj", "B")][3, 2] += 1e-6
    uids["one value"] = parse(draft, tmp_path / "value").uid
    draft = Draft()
    draft.tensors = {name: tensor.half() for name, tensor in draft.tensors.items()}
    uids["dtype"] = parse(draft, tmp_path / "dtype").uid
    # The same bits, read as another type.
    draft.tensors = {name: tensor.view(torch.bfloat16) for name, tensor in draft.tensors.items()}
    uids["dtype alone"] = parse(draft, tmp_path / "bits").uid
    draft = Draft()
    a, b = (key_of(layer, "q_proj", "A") for layer in (0, 1))
    draft.tensors[a], draft.tensors[b] = draft.tensors[b], draft.tensors[a]
    uids["layers swapped"] = parse(draft, tmp_path / "swapped").uid
    assert len(set(uids.values())) == len(uids)


def test_the_first_alpha_pattern_that_matches_counts(tmp_path):
    draft = Draft()
    draft.config["alpha_pattern"] = {r"layers\.1\..*": 20, "q_proj": 12}
    pairs = parse(draft, tmp_path).pairs
    assert {(l, str(m)): pair.scale for (l, m), pair in pairs.items()} == {
        **{(0, "q_proj"): 3.0, (0, "v_proj"): 2.0},
        **{(1, "q_proj"): 5.0, (1, "v_proj"): 5.0},
        **{(2, "q_proj"): 3.0, (2, "v_proj"): 2.0},
    }


def test_of_overlapping_rank_patterns_the_tensors_decide(tmp_path):
    # PEFT sorts the patterns when it saves, so the file does not say which one was first in training.
    draft = draft_of({(l, "q_proj"): (3 if l == 1 else 5) for l in range(NUM_LAYERS)}, target_modules=["q_proj"])
    draft.config |= {
        "r": 8,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 5, "self_attn.q_proj": 7, "1.self_attn.q_proj": 3},
    }
    pairs = parse(draft, tmp_path).pairs
    assert pairs[1, Module.Q].scale == 8 / math.sqrt(3)
    assert pairs[0, Module.Q].scale == 8 / math.sqrt(5)


def test_layers_without_tensors_are_explained_by_the_configs_own_selection(tmp_path):
    only_1 = {(1, m): 4 for m in ("q_proj", "v_proj")}
    for i, fields in enumerate(
        [
            {"layers_to_transform": 1},
            {"layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
            {"exclude_modules": r".*layers\.[02]\..*"},
            {"target_modules": r"model\.layers\.1\.self_attn\.(q|v)_proj"},
            {"target_modules": ["layers.1.self_attn.q_proj", "1.self_attn.v_proj"]},
        ]
    ):
        assert set(parse(draft_of(only_1, **fields), tmp_path / str(i)).pairs) == set(only_1)


def test_the_summary_says_what_the_adapter_is(tmp_path):
    draft = draft_of(
        {(0, "q_proj"): 2, (2, "q_proj"): 6, (2, "down_proj"): 3}, rank_pattern={"2.*q_proj": 6, "down_proj": 3}
    )
    draft.config |= {"r": 2, "target_modules": r".*(0.*q_proj|2.*(q|down)_proj)"}
    summary = parse(draft, tmp_path).summary()
    assert summary.ranks == (2, 3, 6)
    assert summary.targets == (Module.Q, Module.DOWN)
    assert summary.num_layers == 2
    assert summary.dtypes == ("float32",)
    assert summary.stored_bytes == 4 * ((2 + 6) * (64 + 64) + 3 * (128 + 64))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder = Draft().write(tmp_path)
    wider = dataclasses.replace(SPEC, hidden_size=96)
    with pytest.raises(AdapterRejected, match=r"\[rank, 96\], got \[4, 64\]"):
        parse_folder(folder, wider)


def test_a_config_with_windows_line_ends_is_read(tmp_path):
    folder = Draft().write(tmp_path)
    text = json.dumps(json.loads((folder / CONFIG).read_text()), indent=2).replace("\n", "\r\n")
    (folder / CONFIG).write_bytes(text.encode())
    assert parse_folder(folder, SPEC).pairs
