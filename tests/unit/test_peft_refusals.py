"""Every kind of malformed adapter folder is refused by name, all its problems at once."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interleaf.adapters import peft
from interleaf.adapters.peft import parse_folder
from interleaf.adapters.safetensors_file import SafetensorsFile
from interleaf.core import ModelSpec
from interleaf.errors import AdapterRejected
from tests.support.peft_folders import CONFIG, DEFECTS, MODEL, NUM_LAYERS, WEIGHTS, Draft, shard, write_defective

SPEC = ModelSpec(**MODEL)


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(AdapterRejected) as caught:
        parse_folder(folder, SPEC)
    assert caught.value.adapter == str(folder)
    return caught.value.problems


def test_the_folder_that_defects_are_made_from_is_accepted(tmp_path):
    assert len(parse_folder(Draft().write(tmp_path), SPEC).pairs) == 2 * NUM_LAYERS


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_malformed_folder_is_refused_by_field_and_value(tmp_path, kind):
    problems = problems_of(write_defective(kind, tmp_path))
    assert any(all(word in problem for word in DEFECTS[kind].says) for problem in problems), problems


# Defects of different files and fields, none of which hides another.
TOGETHER = (
    *("ia3", "dora", "modules-to-save", "pissa", "bias-all", "unknown-field", "rank-contradicts"),
    *("tensors-missing-for-a-layer", "tensors-for-no-such-layer", "base-layer", "nan-in-b"),
)


def test_all_problems_are_listed_at_once(tmp_path):
    draft = Draft()
    for kind in TOGETHER:
        DEFECTS[kind].spoil(draft)
    problems = problems_of(draft.write(tmp_path))
    assert len(problems) == len(TOGETHER)
    for kind in TOGETHER:
        assert any(all(word in problem for word in DEFECTS[kind].says) for problem in problems), (kind, problems)


def test_a_refused_field_causes_no_further_problems(tmp_path):
    for name, value in {"r": 0, "rank_pattern": [1], "lora_alpha": "x", "exclude_modules": 3}.items():
        draft = Draft()
        draft.config[name] = value
        assert len(problems_of(draft.write(tmp_path / name))) == 1


def test_thousands_of_stray_tensors_make_one_short_sentence(tmp_path):
    draft = Draft()
    draft.tensors |= {f"stray.{i}": torch.ones(1) for i in range(2000)}
    (problem,) = problems_of(draft.write(tmp_path))
    assert "and 1996 more" in problem
    assert len(problem) < 300


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert "No such file" in problems_of(tmp_path / "nowhere")[0]


def test_a_path_that_no_file_system_takes_is_refused():
    assert "cannot be opened" in problems_of(Path("a\0b"))[0]
    assert "cannot be opened" in problems_of(Path("x" * 5000))[0]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "adapter").write_text("")
    assert "this is a file" in problems_of(tmp_path / "adapter")[0]


def test_an_expression_that_takes_exponential_time_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("interleaf.adapters.peft_targets._MAX_MATCHING_S", 0.2)
    draft = Draft()
    draft.config["target_modules"] = r"(?:[a-z0-9_.]|[a-z]|[._]){1,200}(?:x|y)$"
    problems = problems_of(draft.write(tmp_path))
    assert any("target_modules" in p and "of matching" in p for p in problems), problems


@pytest.mark.parametrize("depth", [11, 26, 200])
def test_an_expression_that_takes_exponential_time_to_compile_is_refused(tmp_path, depth):
    draft = Draft()
    draft.config["target_modules"] = "(?:" * depth + "q_proj" + ")+" * depth
    problems = problems_of(draft.write(tmp_path))
    assert any("target_modules" in p and "nested more than 10 deep" in p for p in problems), problems


def test_many_cheap_patterns_spend_the_same_time_as_one_dear_one(tmp_path, monkeypatch):
    monkeypatch.setattr("interleaf.adapters.peft_targets._MAX_MATCHING_S", 0.0)
    draft = Draft()
    draft.config["rank_pattern"] = {f"layers.{i}.nowhere": 4 for i in range(100)}
    problems = problems_of(draft.write(tmp_path))
    assert any("of matching" in p for p in problems), problems


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 10), "is cut short"),
        (lambda path: os.truncate(path, 4), "is cut short"),
        (Path.unlink, "cannot be read: No such file"),
    ],
    ids=["cut", "emptied", "gone"],
)
def test_a_file_that_changes_behind_its_header_is_refused(tmp_path, monkeypatch, change, says):
    folder = Draft().write(tmp_path)
    read_header = peft.open_weights

    def changing(*args):
        files = read_header(*args)
        change(folder / WEIGHTS)
        return files

    monkeypatch.setattr(peft, "open_weights", changing)
    problems = problems_of(folder)
    assert all(WEIGHTS in problem and says in problem for problem in problems), problems


@pytest.mark.parametrize("name", Draft().tensors)
def test_a_value_that_is_not_finite_is_found_in_whichever_file_it_is(tmp_path, name):
    draft = Draft(after=[shard])
    draft.tensors[name][1, 1] = float("nan")
    assert "NaN" in problems_of(draft.write(tmp_path))[0]


def test_what_is_refused_for_its_names_is_not_read_as_a_whole(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(SafetensorsFile, "read_all", lambda file: read.append(file.path))
    draft = Draft()
    draft.tensors["stray"] = torch.ones(1)
    assert "stray" in problems_of(draft.write(tmp_path))[0]
    assert not read


def test_a_key_that_stands_twice_among_many_is_named(tmp_path):
    folder = Draft().write(tmp_path)
    many = ", ".join(f'"field{i}": null' for i in range(50_000))
    (folder / CONFIG).write_text(f'{{{many}, "field7": null}}')
    assert "key 'field7' stands twice" in problems_of(folder)[0]


def test_a_pickle_beside_safetensors_is_never_opened(tmp_path):
    Draft().write(tmp_path)
    (tmp_path / "adapter_model.bin").mkdir()
    assert parse_folder(tmp_path, SPEC).pairs


@settings(max_examples=300)
@given(
    name=st.sampled_from([CONFIG, WEIGHTS]),
    place=st.integers(0, 1000),
    new=st.binary(max_size=4),
    cut=st.integers(0, 4),
)
def test_no_damage_to_a_file_ends_in_another_error(tmp_path_factory, name, place, new, cut):
    folder = Draft().write(tmp_path_factory.mktemp("adapter"))
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[:place] + new + raw[place + cut :])
    with suppress(AdapterRejected):
        parse_folder(folder, SPEC)
