"""What leaves host memory lies on disk within a budget, comes back bit by bit, and is not believed when damaged."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from interleaf.adapters.disk_tier import DiskTier, open_folder
from interleaf.adapters.host_tier import HostTier
from interleaf.adapters.image import AdapterImage, build, draft
from interleaf.adapters.image_file import make_header
from interleaf.adapters.slabs import SlabStore, write_slab
from interleaf.adapters.sources import open_adapter
from interleaf.adapters.store import AdapterStore
from interleaf.core import AdapterUid, HostState, ModelSpec, StreamOrder
from interleaf.errors import ConfigError
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.conftest import REPOSITORY
from tests.support.manual_executor import ManualExecutor
from tests.support.peft_folders import MODEL, NUM_LAYERS, Draft, make_tensors

SPEC = ModelSpec(**MODEL)
GEOMETRY = PageGeometry(page_tokens=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, itemsize_bytes=4)
IMAGE_BYTES = 3 * GEOMETRY.page_bytes


def peft_folder(path: Path, seed: int) -> str:
    ranks = {(l, m): 3 for l in range(NUM_LAYERS) for m in ("q_proj", "v_proj")}
    draft = Draft(tensors=make_tensors(ranks, seed))
    draft.config["r"] = 3
    return str(draft.write(path))


def made(source: str, dtype: torch.dtype = torch.float32) -> tuple[AdapterUid, AdapterImage]:
    parsed = open_adapter(source, SPEC)
    return parsed.uid, build(parsed, Shard(SPEC), GEOMETRY, dtype)


SOURCES = [f"dummy:r=3,targets=q+v,seed={seed}" for seed in range(8)]
FILE_BYTES = len(make_header(made(SOURCES[0])[0], "", made(SOURCES[0])[1])) + IMAGE_BYTES


class Disk:
    """A tier whose thread is the test, over one folder."""

    def __init__(self, folder: Path, files: float = 100, dtype: torch.dtype = torch.float32) -> None:
        self.folder = folder
        self.executor = ManualExecutor()
        self.now_s = 0.0
        self.tier = DiskTier(folder, int(files * FILE_BYTES), GEOMETRY, dtype, self.executor, now=lambda: self.now_s)

    def write(self, *sources: str) -> list[AdapterUid]:
        uids = []
        for source in sources:
            uid, image = made(source)
            self.tier.offer(uid, [image])
            self.executor.run_all()
            uids.append(uid)
        return uids

    def read(self, source: str) -> AdapterImage | None:
        uid, image = made(source)
        found: list[AdapterImage | None] = []
        self.tier.fetch(uid, image.layout, found.append)
        self.executor.run_all()
        return found[0]

    def held(self, *sources: str) -> list[str]:
        return [source for source in sources if self.tier.holds(made(source)[0])]

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())


class InProcess:
    """A store that parses adapters itself, over a disk tier."""

    def __init__(self, disk: Disk, images: float) -> None:
        self.fetcher = ManualExecutor()
        self.store: HostTier = AdapterStore(
            SPEC,
            Shard(SPEC),
            GEOMETRY,
            torch.float32,
            int(images * IMAGE_BYTES),
            self.fetcher,
            disk=disk.tier,
            now=lambda: disk.now_s,
        )

    def add(self, source: str) -> AdapterUid:
        return self.store.add(source)

    def made_again(self) -> int:
        """Have what was sent for made of its source. Returns: how many were."""
        count = len(self.fetcher.waiting)
        self.fetcher.run_all()
        return count


class Served:
    """A store of slabs, whose publisher is the test."""

    def __init__(self, disk: Disk, images: float) -> None:
        self.slabs = disk.folder.parent / "slabs"
        self.slabs.mkdir(exist_ok=True)
        self.wanted: list[tuple[AdapterUid, str]] = []
        self.slab_store = SlabStore(
            GEOMETRY,
            torch.float32,
            int(images * IMAGE_BYTES),
            lambda uid, source: self.wanted.append((uid, source)),
            disk=disk.tier,
            now=lambda: disk.now_s,
        )
        self.store: HostTier = self.slab_store

    def add(self, source: str) -> AdapterUid:
        return self.store.add(self.slab(source))

    def slab(self, source: str) -> str:
        parsed = open_adapter(source, SPEC)
        return str(write_slab(self.slabs, parsed.uid, source, draft(parsed, Shard(SPEC), GEOMETRY, torch.float32)))

    def made_again(self) -> int:
        count = len(self.wanted)
        while self.wanted:
            uid, source = self.wanted.pop(0)
            self.slab_store.arrived(uid, self.slab(source), None)
        return count


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return open_folder(str(tmp_path))


@pytest.fixture
def disk(folder: Path) -> Disk:
    return Disk(folder)


@pytest.fixture(params=[InProcess, Served])
def host(request: pytest.FixtureRequest, disk: Disk) -> InProcess | Served:
    """Room for one image."""
    host: InProcess | Served = request.param(disk, images=1)
    return host


# ---------------------------------------------------------------------------------------------------- below a host tier


def test_what_left_host_memory_comes_back_bit_by_bit_and_nothing_is_made_again(
    disk: Disk, host: InProcess | Served
) -> None:
    first = host.add(SOURCES[0])
    host.add(SOURCES[1])
    disk.executor.run_all()
    assert host.store.prepare(first) is HostState.FETCHING
    disk.executor.run_all()
    assert host.store.prepare(first) is HostState.READY
    found, expected = host.store.image(first), made(SOURCES[0])[1]
    assert torch.equal(found.data, expected.data)
    assert found.layout == expected.layout
    assert host.made_again() == 0
    assert (host.store.disk_counts.hits, host.store.used_bytes) == (1, IMAGE_BYTES)


def test_it_comes_back_though_its_source_has_vanished(disk: Disk, tmp_path: Path) -> None:
    host = InProcess(disk, images=1)
    first = host.add(peft_folder(tmp_path / "adapter", seed=1))
    host.add(SOURCES[1])
    shutil.rmtree(tmp_path / "adapter")
    disk.executor.run_all()
    host.store.prepare(first)
    disk.executor.run_all()
    assert host.store.prepare(first) is HostState.READY


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-IMAGE_BYTES // 2] ^= 1
    file.write_bytes(data)


def other_adapter(file: Path) -> None:
    uid, image = made(SOURCES[5])
    file.write_bytes(make_header(uid, "", image) + image.data.numpy().tobytes())


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        other_adapter,
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\xff" * 10_000),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["a bit", "another adapter", "truncated", "empty", "rubbish", "a folder"],
)
def test_a_damaged_file_is_deleted_and_the_source_read(
    disk: Disk, host: InProcess | Served, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = host.add(SOURCES[0])
    host.add(SOURCES[1])
    disk.executor.run_all()
    (file,) = disk.files()
    damage(file)
    host.store.prepare(first)
    disk.executor.run_all()
    assert host.store.prepare(first) is HostState.FETCHING
    assert host.made_again() == 1
    assert host.store.prepare(first) is HostState.READY
    assert torch.equal(host.store.image(first).data, made(SOURCES[0])[1].data)
    assert host.store.disk_counts.errors == 1
    assert file.name in caplog.text
    assert not disk.held(SOURCES[0])
    disk.executor.run_all()  # the image that made room for it is written meanwhile
    assert not file.is_file()


def test_a_file_that_was_removed_is_missed_without_a_word(
    disk: Disk, host: InProcess | Served, caplog: pytest.LogCaptureFixture
) -> None:
    first = host.add(SOURCES[0])
    host.add(SOURCES[1])
    disk.executor.run_all()
    disk.files()[0].unlink()
    host.store.prepare(first)
    disk.executor.run_all()
    assert host.made_again() == 1
    assert host.store.prepare(first) is HostState.READY
    assert host.store.disk_counts.errors == 0
    assert not caplog.records


@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "it cannot be had"])
def test_what_is_removed_while_it_is_read_back_leaves_no_room_taken(
    disk: Disk, host: InProcess | Served, comes: bool
) -> None:
    first, second, _ = (host.add(source) for source in SOURCES[:3])
    disk.executor.run_all()
    if not comes:
        (file,) = disk.folder.glob(f"{first}*")
        file.unlink()
    host.store.prepare(first)
    host.store.remove(first)
    disk.executor.run_all()
    assert host.made_again() == 0
    assert host.store.prepare(second) is HostState.FETCHING
    disk.executor.run_all()
    assert host.store.prepare(second) is HostState.READY


def test_an_adapter_that_is_withdrawn_goes_from_disk_too(disk: Disk, host: InProcess | Served) -> None:
    first = host.add(SOURCES[0])
    host.add(SOURCES[1])
    disk.executor.run_all()
    assert len(disk.files()) == 1
    host.store.remove(first)
    disk.executor.run_all()
    assert disk.files() == []


def test_nothing_touches_the_disk_but_the_tiers_own_thread(
    disk: Disk, host: InProcess | Served, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = host.add(SOURCES[0]), host.add(SOURCES[1])
    disk.executor.run_all()
    away = disk.folder.rename(disk.folder.parent / "away")  # whoever needed the folder now would complain
    assert host.store.prepare(first) is HostState.FETCHING
    host.add(SOURCES[2])
    host.store.remove(second)
    away.rename(disk.folder)
    assert disk.held(SOURCES[0]) == [SOURCES[0]]
    disk.executor.run_all()
    assert host.store.prepare(first) is HostState.READY
    assert (host.store.disk_counts.errors, caplog.records) == (0, [])


def test_a_folder_that_refuses_files_is_told_of_once_and_tried_again_later(
    disk: Disk, host: InProcess | Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        uids = [host.add(source) for source in SOURCES[:4]]
        disk.executor.run_all()
        for uid in (*uids, *uids):
            if host.store.prepare(uid) is HostState.FETCHING:
                disk.executor.run_all()
                assert host.made_again() == 1
            assert host.store.prepare(uid) is HostState.READY
    disk.executor.run_all()
    assert disk.files() == [], "a half file stays"
    assert [record.getMessage().count("no room is left") for record in caplog.records] == [1] * len(caplog.records)
    assert 1 <= len(caplog.records) <= 2  # those that waited beside the first
    disk.now_s = 61.0
    host.store.prepare(uids[0])
    host.made_again()
    disk.executor.run_all()
    assert len(disk.files()) == 1


def test_a_folder_that_has_vanished_costs_no_request(disk: Disk, host: InProcess | Served) -> None:
    first = host.add(SOURCES[0])
    host.add(SOURCES[1])
    disk.executor.run_all()
    shutil.rmtree(disk.folder)
    host.store.prepare(first)
    disk.executor.run_all()
    assert host.made_again() == 1
    assert host.store.prepare(first) is HostState.READY
    disk.executor.run_all()
    host.store.close()


# ---------------------------------------------------------------------------------------------------- the folder


def test_beyond_the_budget_the_longest_unused_file_is_deleted(folder: Path) -> None:
    disk = Disk(folder, files=3)
    disk.write(*SOURCES[:3])
    assert disk.read(SOURCES[0]) is not None
    disk.write(SOURCES[1])  # it leaves host memory again
    disk.write(SOURCES[3])
    assert disk.held(*SOURCES[:4]) == [SOURCES[0], SOURCES[1], SOURCES[3]]
    assert disk.tier.counts.bytes == sum(file.stat().st_size for file in disk.files()) == 3 * FILE_BYTES
    assert (disk.tier.counts.files, disk.tier.counts.writes) == (3, 4)


def test_a_budget_that_has_shrunk_holds_from_the_start(folder: Path) -> None:
    Disk(folder, files=3).write(*SOURCES[:3])
    assert Disk(folder, files=1.5).held(*SOURCES[:3]) == [SOURCES[2]]


def test_when_memory_is_short_the_file_is_innocent(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    disk.write(SOURCES[0])
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", none_left)
        assert disk.read(SOURCES[0]) is None
    assert "cannot be read now" in caplog.text
    assert disk.read(SOURCES[0]) is not None


def test_an_image_larger_than_the_budget_is_not_written_and_moves_nobody(folder: Path) -> None:
    disk = Disk(folder, files=1.5)
    disk.write(SOURCES[0])
    disk.write("dummy:r=12,targets=all,seed=1")
    assert disk.held(SOURCES[0]) == [SOURCES[0]]
    assert len(disk.files()) == 1


def test_the_next_engine_finds_what_this_one_has_written_and_in_its_order(folder: Path) -> None:
    before = Disk(folder, files=3)
    before.write(*SOURCES[:3])
    for age_s, source in ((30, SOURCES[1]), (20, SOURCES[0]), (10, SOURCES[2])):
        (file,) = folder.glob(f"{made(source)[0]}*")
        os.utime(file, ns=(0, file.stat().st_mtime_ns - age_s * 10**9))
    before.tier.close()
    after = Disk(folder, files=3)
    image = after.read(SOURCES[2])
    assert image is not None
    assert torch.equal(image.data, made(SOURCES[2])[1].data)
    after.write(SOURCES[3])
    assert after.held(*SOURCES[:4]) == [SOURCES[0], SOURCES[2], SOURCES[3]]


def test_two_engines_share_files_and_one_budget(folder: Path) -> None:
    one, other = Disk(folder, files=2), Disk(folder, files=2)
    one.write(SOURCES[0])
    other.write(SOURCES[0])
    assert (one.tier.counts.writes, other.tier.counts.writes) == (1, 0)
    assert other.read(SOURCES[0]) is not None
    other.write(SOURCES[1], SOURCES[2])
    assert len(one.files()) == 2
    assert one.read(SOURCES[0]) is None
    assert one.tier.counts.errors == 0


def test_images_of_other_engines_layouts_are_other_files(folder: Path) -> None:
    single, half = Disk(folder), Disk(folder, dtype=torch.bfloat16)
    single.write(SOURCES[0])
    uid, image = made(SOURCES[0], torch.bfloat16)
    half.tier.offer(uid, [image])
    half.executor.run_all()
    assert len(single.files()) == 2
    found = single.read(SOURCES[0])
    assert found is not None
    assert found.data.dtype is torch.float32
    other_rank = DiskTier(folder, 10**9, GEOMETRY, torch.float32, ManualExecutor(), rank=1, world=2)
    assert not other_rank.holds(uid)


def test_what_a_killed_engine_was_writing_is_removed_and_what_another_is_writing_stays(folder: Path) -> None:
    uid = made(SOURCES[0])[0]
    dead, living = folder / f"{uid}-0.image.dead.part", folder / f"{uid}-0.image.living.part"
    dead.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        disk = Disk(folder)
        assert disk.files() == [living]
    assert disk.tier.counts.files == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_disk_tier import SOURCES, Disk
os.rename = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
Disk(Path(sys.argv[1])).write(SOURCES[0])
"""


@pytest.mark.long
def test_a_process_that_is_killed_before_a_file_is_whole_leaves_none(folder: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = folder.iterdir()
    assert left.stat().st_size == FILE_BYTES
    disk = Disk(folder)
    assert disk.files() == []
    assert disk.read(SOURCES[0]) is None


def test_few_wait_to_be_written_and_the_rest_goes_without(disk: Disk) -> None:
    leaving = [(uid, [image]) for uid, image in map(made, SOURCES[:5])]
    for uid, image in leaving:
        disk.tier.offer(uid, image)
    disk.executor.run_all()
    assert disk.held(*SOURCES[:5]) == SOURCES[:2]
    assert all(image == [] for _, image in leaving), "an image is kept in memory"


def test_a_tier_that_is_closed_has_nothing_and_breaks_nothing(disk: Disk) -> None:
    disk.write(SOURCES[0])
    disk.tier.close()
    assert disk.read(SOURCES[0]) is None
    disk.write(SOURCES[1])
    assert len(disk.files()) == 1


def test_files_are_for_this_user_only(disk: Disk, tmp_path: Path) -> None:
    disk.write(SOURCES[0])
    assert disk.folder.stat().st_mode & 0o077 == 0
    assert disk.files()[0].stat().st_mode & 0o077 == 0


def test_a_folder_that_others_may_write_to_or_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "made" / "on the way"))
    assert open_folder(str(tmp_path / "made" / "on the way")) == folder
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="only this user may write"):
        open_folder(str(tmp_path / "made" / "on the way"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"adapter_disk_dir=.*cannot hold adapters"):
        open_folder(str(tmp_path / "file"))


def test_a_folder_that_cannot_be_listed_is_told_of_and_counts_as_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path / "absent", 10**9, GEOMETRY, torch.float32, ManualExecutor())
    assert tier.counts.files == 0
    assert "cannot be listed" in caplog.text


def test_engines_of_two_stream_orders_leave_each_others_files_alone(tmp_path: Path) -> None:
    parsed = open_adapter(SOURCES[0], SPEC)
    tiers, images = {}, {}
    for order in StreamOrder:
        thread = ManualExecutor()
        tiers[order] = DiskTier(tmp_path, 10**9, GEOMETRY, torch.float32, thread, order=order), thread
        images[order] = build(parsed, Shard(SPEC), GEOMETRY, torch.float32, order)
    for order, (tier, thread) in tiers.items():
        tier.offer(parsed.uid, [images[order]])
        thread.run_all()
    for order, (tier, thread) in tiers.items():
        found: list[AdapterImage | None] = []
        tier.fetch(parsed.uid, images[order].layout, found.append)
        thread.run_all()
        assert found[0] is not None, (order, tier.counts)
        assert torch.equal(found[0].data, images[order].data)
        assert tier.counts.errors == 0
