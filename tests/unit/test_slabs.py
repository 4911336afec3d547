"""Slabs hold what was laid out, lose their name when mapped, and come back when they are asked for."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interleaf.adapters import slabs
from interleaf.adapters.image import AdapterImage, ImageDraft, build, draft
from interleaf.adapters.slabs import SlabStore, map_slab, write_slab
from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid, HostState, ModelSpec, Module, StreamOrder
from interleaf.errors import AdapterLoadFailed
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.peft_folders import MODEL, NUM_LAYERS

SPEC = ModelSpec(**MODEL)
GEOMETRY = PageGeometry(page_tokens=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, itemsize_bytes=4)
IMAGE_BYTES = 3 * GEOMETRY.page_bytes
"""Of an adapter of rank 3 on q and v: 672 elements a layer, in lanes of 256."""


def made(seed: int, rank: int = 3) -> tuple[AdapterUid, str, ImageDraft]:
    source = f"dummy:r={rank},targets=q+v,seed={seed}"
    parsed = open_adapter(source, SPEC)
    return parsed.uid, source, draft(parsed, Shard(SPEC), GEOMETRY, torch.float32)


def data_of(seed: int, rank: int = 3) -> torch.Tensor:
    """What a slab of it must hold."""
    parsed = open_adapter(made(seed, rank)[1], SPEC)
    return build(parsed, Shard(SPEC), GEOMETRY, torch.float32).data


class Tier:
    """A store whose slabs the test writes, and what it has asked for."""

    def __init__(self, folder: Path, images: float) -> None:
        self.folder = folder
        self.wanted: list[tuple[AdapterUid, str]] = []
        self.store = SlabStore(
            GEOMETRY,
            torch.float32,
            int(images * IMAGE_BYTES),
            lambda uid, source: self.wanted.append((uid, source)),
            now=lambda: 0.0,
        )

    def add(self, seed: int) -> AdapterUid:
        return self.store.add(str(write_slab(self.folder, *made(seed))))

    def in_memory(self, *uids: AdapterUid) -> list[AdapterUid]:
        found = []
        for uid in uids:
            try:
                self.store.image(uid)
            except AdapterLoadFailed:
                continue
            found.append(uid)
        return found


@pytest.mark.parametrize("rank", [1, 3, 40])
def test_a_slab_holds_every_byte_and_loses_its_name(tmp_path: Path, rank: int) -> None:
    uid, source, image = made(7, rank)
    path = write_slab(tmp_path, uid, source, image)
    assert path.stat().st_mode & 0o077 == 0, "another user may read it"
    slab = map_slab(str(path), GEOMETRY, torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert (slab.uid, slab.source, slab.image.layout) == (uid, source, image.layout)
    assert torch.equal(slab.image.data, data_of(7, rank))


@pytest.mark.parametrize("order", StreamOrder)
@pytest.mark.parametrize("written_together", [1, 2048, 4096, 2**20], ids=["1 layer", "2 layers", "4 layers", "all"])
def test_a_slab_is_the_image_however_many_layers_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_together: int, order: StreamOrder
) -> None:
    monkeypatch.setattr(slabs, "_MIN_WRITE_BYTES", written_together)
    spec = ModelSpec(**MODEL | {"num_layers": 5})
    geometry = replace(GEOMETRY, num_layers=5)
    parsed = open_adapter("dummy:r=17,targets=q+k+up,seed=3", spec)
    sparse = {at: pair for at, pair in parsed.pairs.items() if at[0] in (1, 2) or at == (4, Module.K)}
    parsed = replace(parsed, pairs=sparse)
    whole = draft(parsed, Shard(spec), geometry, torch.float32, order)
    slab = map_slab(str(write_slab(tmp_path, parsed.uid, "", whole)), geometry, torch.float32)
    assert torch.equal(slab.image.data, build(parsed, Shard(spec), geometry, torch.float32, order).data)


def test_what_a_file_system_takes_in_pieces_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:100], at))
    slab = map_slab(str(write_slab(tmp_path, *made(7))), GEOMETRY, torch.float32)
    assert torch.equal(slab.image.data, data_of(7))


@pytest.mark.parametrize("calls", [0, 3])
def test_a_folder_that_fills_up_meanwhile_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    write, done = os.pwrite, itertools.count()

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if next(done) == calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(AdapterLoadFailed, match=f"its {IMAGE_BYTES} bytes could not be written.*No space left"):
        write_slab(tmp_path, *made(1))
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ImageDraft, layers: int) -> Iterator[torch.Tensor]:
        yield torch.zeros(3, layers, GEOMETRY.lane_elems)
        raise MemoryError("no more")

    monkeypatch.setattr(ImageDraft, "parts", broken)
    with pytest.raises(MemoryError, match="no more"):
        write_slab(tmp_path, *made(1))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_publisher_was_writing_is_no_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bytes] = []
    write = os.pwrite

    def seen(descriptor: int, data: memoryview, at: int) -> int:
        states.extend(path.read_bytes() for path in tmp_path.iterdir())
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", seen)
    write_slab(tmp_path, *made(1)).unlink()
    assert len(states[-1]) > IMAGE_BYTES, "only the header was missing"
    for number, state in enumerate(states):
        left = tmp_path / str(number)
        left.write_bytes(state)
        with pytest.raises(AdapterLoadFailed):
            map_slab(str(left), GEOMETRY, torch.float32)


def test_one_adapter_may_be_written_twice_at_a_time(tmp_path: Path) -> None:
    first, second = (write_slab(tmp_path, *made(1)) for _ in range(2))
    assert first != second
    assert torch.equal(
        map_slab(str(first), GEOMETRY, torch.float32).image.data,
        map_slab(str(second), GEOMETRY, torch.float32).image.data,
    )


def test_what_is_no_slab_of_this_pool_is_refused(tmp_path: Path) -> None:
    path = write_slab(tmp_path, *made(1))
    whole = path.read_bytes()
    with pytest.raises(AdapterLoadFailed, match="bfloat16"):
        map_slab(str(path), GEOMETRY, torch.bfloat16)
    for spoiled in (whole[:-1], whole[:100], b"", b"\xff" * 100):
        path.write_bytes(spoiled)
        with pytest.raises(AdapterLoadFailed):
            map_slab(str(path), GEOMETRY, torch.float32)
    path.unlink()
    with pytest.raises(AdapterLoadFailed, match="could not be mapped"):
        map_slab(str(path), GEOMETRY, torch.float32)


def test_a_folder_without_room_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(AdapterLoadFailed, match="could not be written"):
        write_slab(tmp_path / "absent", *made(1))
    assert list(tmp_path.iterdir()) == []


def test_beyond_the_budget_a_slab_is_dropped_and_asked_for_with_its_source(tmp_path: Path) -> None:
    tier = Tier(tmp_path, images=2)
    a, b, c = (tier.add(seed) for seed in range(3))
    assert tier.in_memory(a, b, c) == [b, c]
    assert tier.store.used_bytes == 2 * IMAGE_BYTES
    assert tier.store.prepare(a) is HostState.FETCHING
    assert tier.store.prepare(a) is HostState.FETCHING
    assert tier.wanted == tier.store.asked() == [(a, made(0)[1])]
    tier.store.arrived(a, str(write_slab(tmp_path, *made(0))), None)
    assert tier.store.prepare(a) is HostState.READY
    assert torch.equal(tier.store.image(a).data, data_of(0))
    assert tier.store.asked() == []


def test_a_slab_that_cannot_be_made_again_is_a_failure_said_once(tmp_path: Path) -> None:
    tier = Tier(tmp_path, images=1)
    a, _ = tier.add(0), tier.add(1)
    tier.store.prepare(a)
    tier.store.arrived(a, None, "its source has changed")
    assert tier.store.prepare(a) is HostState.FAILED
    assert tier.store.failure(a) == "its source has changed"
    assert tier.store.prepare(a) is HostState.FETCHING
    assert len(tier.wanted) == 2


def test_one_that_is_removed_while_it_is_on_its_way_leaves_no_room_taken(tmp_path: Path) -> None:
    tier = Tier(tmp_path, images=1)
    a, b = tier.add(0), tier.add(1)
    for arrival in ("slab", "failure"):
        tier.store.prepare(a)
        tier.store.remove(a)
        slab = str(write_slab(tmp_path, *made(0))) if arrival == "slab" else None
        tier.store.arrived(a, slab, None if slab else "unloaded")
        assert list(tmp_path.iterdir()) == [], "a slab that nobody wants any more kept its name"
        a = tier.add(0)
        b = tier.add(1)
    assert tier.in_memory(a, b) == [b]
    assert tier.store.prepare(a) is HostState.FETCHING
    assert tier.wanted[-1][0] == a, "room was still kept for what never came"


def test_images_are_prepared_whether_they_are_added_or_come_back(tmp_path: Path) -> None:
    prepared: list[AdapterImage] = []

    def prepare(image: AdapterImage) -> AdapterImage:
        prepared.append(image)
        return image

    store = SlabStore(GEOMETRY, torch.float32, IMAGE_BYTES, lambda uid, source: None, prepare=prepare, now=lambda: 0.0)
    first = store.add(str(write_slab(tmp_path, *made(1))))
    second = store.add(str(write_slab(tmp_path, *made(2))))
    assert store.prepare(first) is HostState.FETCHING
    store.arrived(first, str(write_slab(tmp_path, *made(1))), None)
    assert [image.num_bytes for image in prepared] == [IMAGE_BYTES] * 3
    assert store.prepare(first) is HostState.READY
    assert store.image(first) is prepared[2]
    assert second in store
