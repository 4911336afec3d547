"""Filling tensors in place, as a GPU's are, against reading them as a CPU does; on CPU tensors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from interleaf.core import LoraGroup
from interleaf.errors import CheckpointError
from interleaf.model.loading import TensorReader
from interleaf.model.spec import parse_spec
from interleaf.parallel.shard import Shard
from interleaf.weights import open_checkpoint, staging
from interleaf.weights.staging import DeviceReader
from tests.support.tiny_models import FAMILIES, make_model, save_model

SLICES = [(None, None), (slice(16, 48), None), (None, slice(3, 20)), (slice(0, 1), slice(8, 9))]
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix takes several buffers, and every buffer several reads, the last of them short."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 3000)
    monkeypatch.setattr(staging, "PIECE_BYTES", 700)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in several files."""
    path = tmp_path_factory.mktemp("tiny")
    model = make_model("qwen2")
    model.save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("rows", "cols"), SLICES)
def test_a_slice_is_filled_with_the_slice_of_the_whole(folder, load_format, rows, cols):
    checkpoint = open_checkpoint(str(folder), load_format)
    whole = torch.empty(checkpoint.shape(Q))
    checkpoint.fill(whole, Q)
    if load_format == "auto":
        assert torch.equal(whole, checkpoint.get(Q))
    expected = whole[rows or slice(None), cols or slice(None)]
    out = torch.empty(expected.shape)
    checkpoint.fill(out, Q, rows, cols)
    assert torch.equal(out, expected)
    checkpoint.close()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_converted_to_the_dtype_that_is_wanted(tmp_path, folder, stored, wanted):
    values = torch.randn(100, 33, generator=torch.Generator().manual_seed(1)).to(stored)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({"x": values, "model.embed_tokens.weight": values[:3].clone()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    out = torch.empty(100, 33, dtype=wanted)
    checkpoint.fill(out, "x")
    assert torch.equal(out, values.to(wanted))
    checkpoint.close()


def test_a_file_cut_short_after_it_was_opened_is_an_error(folder):
    checkpoint = open_checkpoint(str(folder))
    out = torch.empty(checkpoint.shape(Q))
    file = folder / checkpoint._file_of[Q]
    size = file.stat().st_size
    kept = file.read_bytes()
    try:
        with file.open("r+b") as f:
            f.truncate(size // 4)
        with pytest.raises(CheckpointError, match="ends after"):
            checkpoint.fill(out, Q)
    finally:
        file.write_bytes(kept)
    checkpoint.close()


@pytest.mark.parametrize("length", [1, 699, 700, 701, 3000, 3001, 9999])
def test_any_length_from_any_place_is_read(tmp_path, length):
    content = torch.randint(256, (12000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    (tmp_path / "f").write_bytes(content.numpy().tobytes())
    reader = DeviceReader(torch.device("cpu"))
    with (tmp_path / "f").open("rb") as f:
        for first in (0, 13):
            out = torch.empty(length, dtype=torch.uint8)
            reader.read(f.fileno(), first, out)
            assert torch.equal(out, content[first : first + length])
    reader.close()


def test_dummy_weights_drawn_in_place_depend_on_seed_and_name(folder):
    def drawn(seed, name):
        checkpoint = open_checkpoint(str(folder), "dummy", seed)
        out = torch.empty(checkpoint.shape(name))
        checkpoint.fill(out, name)
        return out

    assert torch.equal(drawn(1, Q), drawn(1, Q))
    assert not torch.equal(drawn(1, Q), drawn(2, Q))
    assert not torch.equal(drawn(1, Q), drawn(1, Q.replace("layers.1", "layers.0")))
    assert (drawn(1, NORM) == 1).all()
    embedding = drawn(1, "model.embed_tokens.weight")
    assert embedding.std() * embedding.shape[1] ** 0.5 == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_for_a_device_reads_what_a_reader_for_the_cpu_reads(tmp_path, monkeypatch, family, world):
    checkpoint = open_checkpoint(str(save_model(make_model(family), tmp_path)))
    spec = parse_spec(checkpoint.config, "tiny")
    for rank in range(world):
        seen: tuple[list[tuple[int, int]], ...] = ([], [])
        to_read = (spec, Shard(spec, rank, world), checkpoint, torch.float32, torch.device("cpu"))
        readers = [TensorReader(*to_read, lambda *n, calls=calls: calls.append(n)) for calls in seen]
        monkeypatch.setattr(readers[1], "_fills", True)
        read = []
        for reader in readers:
            embed = reader.embedding()
            found = [embed, reader.head(embed), reader.norm(NORM)]
            for group in LoraGroup:
                found += [t for t in reader.group(2, group) if t is not None]
            if spec.qk_norm:
                found.append(reader.qk_norm(0))
            read.append(found)
        assert all(torch.equal(a, b) for a, b in zip(*read, strict=True))
        assert seen[0] == seen[1]
        assert len(seen[0]) > 0
    checkpoint.close()


def test_a_tensor_of_another_shape_is_refused_before_it_is_read(folder, monkeypatch):
    checkpoint = open_checkpoint(str(folder), "dummy")
    spec = parse_spec(checkpoint.config | {"hidden_size": 128, "head_dim": 16}, "tiny")
    reader = TensorReader(spec, Shard(spec), checkpoint, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(reader, "_fills", True)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[64\].*asks for \[128\]"):
        reader.norm(NORM)
