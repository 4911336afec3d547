"""Memory is registered with the driver, if at all, on a thread of its own: the step loop's never waits for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from interleaf.adapters import pinned
from interleaf.adapters.disk_tier import DiskTier, open_folder
from interleaf.adapters.image import AdapterImage, draft
from interleaf.adapters.pinned import PinnedMemory, block_size
from interleaf.adapters.slabs import SlabStore, write_slab
from interleaf.adapters.sources import open_adapter
from interleaf.config import EngineConfig
from interleaf.core import AdapterUid, HostState, ModelSpec
from interleaf.engine.build import image_thread
from interleaf.errors import AdapterLoadFailed
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.manual_executor import ManualExecutor
from tests.support.peft_folders import MODEL, NUM_LAYERS

SPEC = ModelSpec(**MODEL)
GEOMETRY = PageGeometry(page_tokens=4, num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, itemsize_bytes=4)
IMAGE_BYTES = 3 * GEOMETRY.page_bytes


class Driver:
    """Notes which thread registers what, and lets it go."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.threads: list[tuple[str, str]] = []

    def cudaHostRegister(self, first: int, num_bytes: int, flags: int) -> int:
        assert first not in self.registered
        self.registered[first] = num_bytes
        self.threads.append(("register", threading.current_thread().name))
        return 0

    def cudaHostUnregister(self, first: int) -> int:
        del self.registered[first]
        self.threads.append(("let go", threading.current_thread().name))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(pinned, "_forget_error", lambda: None)
    return driver


class Tier:
    """A store of slabs that are pinned, and what it has asked for."""

    def __init__(self, folder: Path, images: float, executor: Executor, disk: DiskTier | None = None) -> None:
        self.folder = folder
        self.wanted: list[AdapterUid] = []
        self.arrivals = 0
        self.memory = PinnedMemory(2 * block_size(IMAGE_BYTES))
        self.store = SlabStore(
            GEOMETRY,
            torch.float32,
            int(images * IMAGE_BYTES),
            lambda uid, source: self.wanted.append(uid),
            on_arrival=self.arrived,
            disk=disk,
            prepare=self.memory.pin,
            executor=executor,
            now=lambda: 0.0,
        )

    def arrived(self) -> None:
        self.arrivals += 1

    @property
    def blocks_in_use(self) -> int:
        return (self.memory.num_bytes - self.memory.num_free_bytes) // block_size(IMAGE_BYTES)

    def slab(self, seed: int) -> str:
        source = f"dummy:r=3,targets=q+v,seed={seed}"
        parsed = open_adapter(source, SPEC)
        image = draft(parsed, Shard(SPEC), GEOMETRY, torch.float32)
        return str(write_slab(self.folder, parsed.uid, source, image))

    def add(self, seed: int) -> AdapterUid:
        return self.store.add(self.slab(seed))

    def has(self, uid: AdapterUid) -> bool:
        try:
            self.store.image(uid)
        except AdapterLoadFailed:
            return False
        return True


@pytest.fixture
def executor() -> ManualExecutor:
    return ManualExecutor()


@pytest.fixture
def tier(tmp_path: Path, executor: ManualExecutor, driver: Driver) -> Tier:
    return Tier(tmp_path, 2, executor)


def test_an_adapter_that_is_added_can_be_used_once_it_is_registered_and_is_not_asked_for(
    tier: Tier, executor: ManualExecutor, driver: Driver
) -> None:
    uid = tier.add(1)
    assert uid in tier.store
    assert tier.store.layout(uid).pages == 3
    assert tier.store.prepare(uid) is HostState.FETCHING
    assert (driver.registered, tier.wanted, tier.store.used_bytes, tier.arrivals) == ({}, [], 0, 0)
    executor.run_all()
    assert tier.arrivals == 1
    assert tier.store.prepare(uid) is HostState.READY
    assert [*driver.registered] == [tier.store.image(uid).data.data_ptr()]
    assert tier.wanted == []


def test_one_that_comes_back_is_not_there_before_it_is_registered(
    tier: Tier, executor: ManualExecutor, driver: Driver
) -> None:
    a, _, _ = (tier.add(seed) for seed in range(3))
    executor.run_all()
    assert tier.store.prepare(a) is HostState.FETCHING
    tier.store.arrived(a, tier.slab(0), None)
    assert tier.store.prepare(a) is HostState.FETCHING
    before = tier.arrivals
    executor.run_all()
    assert tier.arrivals == before + 1, "nobody wakes whoever waits for it"
    assert tier.store.prepare(a) is HostState.READY
    assert tier.blocks_in_use == 2
    assert len(driver.registered) == 3, "it takes the memory of one that has gone"
    assert tier.wanted == [a]


def test_one_that_is_added_again_while_it_is_registered_is_one(
    tier: Tier, executor: ManualExecutor, driver: Driver
) -> None:
    first, again = tier.add(1), tier.add(1)
    executor.run_all()
    tier.add(1)
    executor.run_all()
    gc.collect()
    assert first == again
    assert tier.store.prepare(first) is HostState.READY
    assert (tier.blocks_in_use, tier.store.used_bytes) == (1, IMAGE_BYTES)


def test_one_that_is_removed_while_it_is_registered_leaves_nothing(
    tier: Tier, executor: ManualExecutor, driver: Driver
) -> None:
    uid = tier.add(1)
    tier.store.remove(uid)
    other = tier.add(1)
    executor.run_all()
    assert tier.store.prepare(other) is HostState.READY
    tier.store.remove(other)
    executor.run_all()
    gc.collect()
    assert (tier.store.used_bytes, len(tier.store)) == (0, 0)
    assert (tier.blocks_in_use, len(driver.registered)) == (0, 1)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "pins") as threads:
        yield threads


@pytest.mark.parametrize("with_disk", [False, True])
def test_the_loops_thread_neither_registers_nor_lets_go(
    tmp_path: Path, driver: Driver, threads: ThreadPoolExecutor, with_disk: bool
) -> None:
    disk_thread = ThreadPoolExecutor(1, "disk")
    disk = DiskTier(open_folder(str(tmp_path)), 10**6, GEOMETRY, torch.float32, disk_thread) if with_disk else None
    slabs = tmp_path / "slabs"
    slabs.mkdir()
    tier = Tier(slabs, 1, threads, disk)

    def settle() -> None:
        for executor in (threads, disk_thread, threads):
            executor.submit(int).result()

    gc.disable()  # what goes here goes by counts alone, at once
    try:
        first = tier.add(1)
        settle()
        tier.add(2)  # takes its place
        settle()
        tier.store.prepare(first)
        settle()
        if not with_disk:
            tier.store.arrived(first, tier.slab(1), None)
            settle()
        assert tier.store.prepare(first) is HostState.READY
        tier.store.remove(first)
        settle()
    finally:
        gc.enable()
    # The third came when the second had yet to go, as did the second; there was memory for it all the same.
    assert [what for what, _ in driver.threads] == ["register"] * 2
    assert tier.blocks_in_use == 0
    assert {thread.rpartition("_")[0] for _, thread in driver.threads} == {"pins"}
    tier.store.close()
    disk_thread.shutdown()


def test_memory_is_registered_in_the_context_of_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, object]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, device))
    )
    for device in ("cuda:3", "cuda", "cpu"):
        with image_thread(device, EngineConfig(device=device)) as thread:
            thread.submit(int).result()
    assert chosen == [("cuda:3_0", 3), ("cuda_0", 0)]


def test_an_image_that_cannot_be_prepared_comes_all_the_same(
    tier: Tier, executor: ManualExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> None:
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "cudart", no_driver)
    uid = tier.add(1)
    executor.run_all()
    assert tier.store.prepare(uid) is HostState.READY
    assert "no NVIDIA driver" in caplog.text


def test_a_store_that_closes_waits_for_what_is_being_registered(
    tier: Tier, executor: ManualExecutor, driver: Driver
) -> None:
    tier.add(1)
    tier.store.close()
    assert executor.is_shut_down
    gc.collect()
    assert (tier.blocks_in_use, len(driver.registered)) == (0, 1)


def test_an_image_prepared_where_it_comes_in_is_there_at_once(tmp_path: Path, driver: Driver) -> None:
    seen: list[AdapterImage] = []

    def note(image: AdapterImage) -> AdapterImage:
        seen.append(image)
        return image

    store = SlabStore(GEOMETRY, torch.float32, IMAGE_BYTES, lambda uid, source: None, prepare=note, now=lambda: 0.0)
    uid = store.add(Tier(tmp_path, 1, ManualExecutor()).slab(1))
    assert store.prepare(uid) is HostState.READY
    assert store.image(uid) is seen[0]
