"""Images registered with a driver that takes whole memory pages, once each, as CUDA's does."""

import ctypes
import gc
import mmap
import random
import re
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from interleaf.adapters import pinned
from interleaf.adapters.image import AdapterImage
from interleaf.core import PooledLayout
from interleaf.engine.cuda.host_memory import registered
from interleaf.errors import ConfigError

PAGE = mmap.PAGESIZE
LAYOUT = PooledLayout((), (), 1, 0)


class Driver:
    """Knows which memory pages are registered; refuses those that are already."""

    def __init__(self) -> None:
        self.ranges: dict[int, range] = {}
        self.refuses = False
        self.most_pages = 10**9
        self.is_strict = False
        self.calls = 0

    def cudaHostRegister(self, first: int, num_bytes: int, flags: int) -> int:
        self.calls += 1
        pages = range(first // PAGE, -(-(first + num_bytes) // PAGE))
        if self.refuses or any(pages.start < taken.stop and taken.start < pages.stop for taken in self.ranges.values()):
            return 712
        if sum(map(len, self.ranges.values())) + len(pages) > self.most_pages:
            return 2
        assert not self.is_strict or all_are_there(first, num_bytes), "the driver would have to make them"
        self.ranges[first] = pages
        return 0

    def cudaHostUnregister(self, first: int) -> int:
        self.calls += 1
        del self.ranges[first]
        return 0


def all_are_there(first: int, num_bytes: int) -> bool:
    seen = (ctypes.c_ubyte * -(-num_bytes // PAGE))()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), seen) == 0
    return all(page & 1 for page in seen)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(pinned, "_forget_error", lambda: None)
    return driver


def images(*sizes: int, first: int = 64) -> list[AdapterImage]:
    """Images side by side in one block, as a heap gives them."""
    block = torch.arange(first + sum(sizes)).to(torch.uint8)
    made = []
    for size in sizes:
        made.append(AdapterImage(LAYOUT, block[first : first + size].view(1, 1, -1)))
        first += size
    return made


@pytest.fixture
def memory(driver: Driver) -> pinned.PinnedMemory:
    driver.is_strict = True
    return pinned.PinnedMemory(2**30)


def test_neighbours_on_the_heap_are_all_registered_and_share_no_page(driver, memory):
    before = images(3 * PAGE, 100, 5 * PAGE + 64, 2**20)
    after = [memory.pin(image) for image in before]
    assert len(driver.ranges) == 4
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.data, other.data)
        assert other.layout is one.layout
        pages = driver.ranges[other.data.data_ptr()]
        assert len(pages) == -(-other.num_bytes // PAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [2**21 - PAGE, 2**21, 5 * 2**20 + 4 * PAGE])
def test_an_image_of_another_process_is_moved_too_and_begins_at_a_huge_page_if_it_fills_one(
    driver, memory, dtype, num_bytes
):
    mapping = mmap.mmap(-1, num_bytes + PAGE)
    data = torch.frombuffer(mapping, dtype=dtype, offset=PAGE).view(4, 2, -1)
    data.copy_(torch.arange(data.numel()).view(data.shape) % 251)
    image = memory.pin(AdapterImage(LAYOUT, data))
    assert torch.equal(image.data, data)
    assert image.data.is_contiguous()
    assert [*driver.ranges] == [image.data.data_ptr()] != [data.data_ptr()]
    assert image.data.data_ptr() % (2**21 if num_bytes >= 2**21 else PAGE) == 0


@pytest.mark.parametrize("num_bytes", [1, 100, PAGE, PAGE + 1, 20 * PAGE, 2**21, 10_027_008, 83_886_080, 2**30 - 5])
def test_a_block_is_little_larger_than_its_image(num_bytes):
    size = pinned.block_size(num_bytes)
    assert size % PAGE == 0
    assert num_bytes <= size <= max(num_bytes + PAGE, num_bytes * 17 / 16)
    assert pinned.block_size(size) == size


@pytest.mark.parametrize("num_bytes", [2**20, 2**21, 2**21 + 2**18, 2**22 + 2**17])
def test_memory_is_taken_for_the_image_and_no_more(memory, num_bytes):
    """Neither for room to begin at a huge page, nor for one of which the image would fill a part."""
    data = torch.zeros(1, 1, num_bytes, dtype=torch.uint8)
    memory.pin(AdapterImage(LAYOUT, data.clone()))
    before, count = resident_bytes(), 2**26 // num_bytes
    kept = [memory.pin(AdapterImage(LAYOUT, data)) for _ in range(count)]
    assert resident_bytes() - before < 1.15 * count * num_bytes
    assert len(kept) == count


def test_blocks_are_of_huge_pages_where_they_fill_them(driver, memory):
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("a system without")
    memory.pin(AdapterImage(LAYOUT, torch.zeros(1, 1, 2**22 + 2**20, dtype=torch.uint8)))
    (first,) = driver.ranges
    assert "hg" in mapping_flags(first)
    assert "hg" in mapping_flags(first + 2**22 - PAGE)
    assert "hg" not in mapping_flags(first + 2**22)


def mapping_flags(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


def test_memory_of_an_image_that_has_gone_takes_the_next_of_its_size(driver, memory):
    first = memory.pin(images(9 * PAGE)[0])
    place, registered_then = first.data.data_ptr(), dict(driver.ranges)
    other = memory.pin(images(9 * PAGE)[0])
    assert other.data.data_ptr() != place
    del first
    gc.collect()
    assert set(driver.ranges) > set(registered_then), "nothing is let go as images come and go"
    again = memory.pin(images(9 * PAGE, first=128)[0])
    assert again.data.data_ptr() == place
    assert torch.equal(again.data, images(9 * PAGE, first=128)[0].data)
    assert torch.equal(other.data, images(9 * PAGE)[0].data)
    assert len(driver.ranges) == 2
    assert memory.num_bytes == sum(map(len, driver.ranges.values())) * PAGE


def test_memory_that_anything_still_looks_at_is_not_used_again(driver, memory):
    """A copy to the device, or to disk, may hold a part of what the tier has let go."""
    image = memory.pin(images(9 * PAGE)[0])
    expected = image.data.clone()
    looks = [image.data[0, 0, 5:], image.data.view(torch.int32), memoryview(image.data.numpy())]
    del image
    while looks:
        gc.collect()
        other = memory.pin(AdapterImage(LAYOUT, torch.zeros(1, 1, 9 * PAGE, dtype=torch.uint8)))
        assert len(driver.ranges) == 2
        for look in looks:
            seen = look if isinstance(look, memoryview) else look.numpy()
            found = torch.frombuffer(bytearray(seen.tobytes()), dtype=torch.uint8)
            assert torch.equal(found, expected.view(-1)[-len(found) :])
        looks.pop(0)
        del other, look, seen
    gc.collect()
    kept = [memory.pin(images(9 * PAGE)[0]) for _ in range(2)]
    assert len(kept) == len(driver.ranges) == 2


def test_blocks_without_images_are_let_go_where_there_would_be_too_many_the_oldest_first(driver):
    memory = pinned.PinnedMemory(40 * PAGE)  # and two blocks of the largest, 40 pages, for an eighth would be 5
    sizes = [4, 4, 12, 4, 16]
    kept = [memory.pin(images(size * PAGE)[0]) for size in sizes]
    places = [image.data.data_ptr() for image in kept]
    for at in (2, 0, 3, 1):  # the order in which they are without
        kept[at] = None
        gc.collect()
    assert set(driver.ranges) == set(places), "nobody wants more"
    large = memory.pin(images(20 * PAGE)[0])
    assert memory.num_bytes == 60 * PAGE
    larger = memory.pin(images(20 * PAGE, first=128)[0])
    assert memory.num_bytes == 80 * PAGE
    assert set(places) < set(driver.ranges)
    more = memory.pin(images(20 * PAGE, first=192)[0])
    assert memory.num_bytes == 80 * PAGE
    assert set(places) & set(driver.ranges) == {places[1], places[4]}
    last = memory.pin(images(20 * PAGE, first=192)[0])
    alive = {image.data.data_ptr() for image in (kept[4], large, larger, more, last)}
    assert set(driver.ranges) == alive, "images are not let go"
    assert sum(map(len, driver.ranges.values())) * PAGE == memory.num_bytes == 96 * PAGE


def test_what_a_burst_took_is_let_go_when_its_images_go(driver):
    memory = pinned.PinnedMemory(16 * 4 * PAGE)
    kept = [memory.pin(image) for image in images(*[4 * PAGE] * 60)]
    assert memory.num_bytes == 60 * 4 * PAGE, "whoever keeps images says how many there may be"
    del kept[16:]
    gc.collect()
    assert memory.num_bytes == 18 * 4 * PAGE
    assert memory.num_free_bytes == 2 * 4 * PAGE
    assert sum(map(len, driver.ranges.values())) * PAGE == memory.num_bytes


def test_an_image_that_goes_where_the_lock_is_held_does_not_wait_for_it(driver):
    """As when garbage is collected there."""
    memory = pinned.PinnedMemory(PAGE)
    kept = [memory.pin(image) for image in images(*[PAGE] * 9)]
    with memory._lock:
        kept.clear()
        gc.collect()
    assert memory.num_bytes == 9 * PAGE
    memory.pin(images(PAGE)[0])
    gc.collect()
    assert sum(map(len, driver.ranges.values())) * PAGE == memory.num_bytes == 3 * PAGE


def test_a_driver_that_has_had_enough_is_asked_again_once_free_blocks_have_gone(driver):
    memory = pinned.PinnedMemory(2**30)
    kept, gone = memory.pin(images(8 * PAGE)[0]), memory.pin(images(16 * PAGE)[0])
    del gone
    gc.collect()
    driver.most_pages = 30
    other = memory.pin(images(20 * PAGE)[0])
    assert {kept.data.data_ptr(), other.data.data_ptr()} == set(driver.ranges)
    assert memory.num_bytes == 28 * PAGE
    image = images(3 * PAGE)[0]
    assert memory.pin(image) is image
    assert memory.num_bytes == 28 * PAGE


@pytest.mark.parametrize(("sizes", "most_calls"), [([16], 0.0), ([16, 32], 0.1), ([8, 16, 32, 64], 0.4)])
def test_a_full_tier_of_few_sizes_hardly_calls_the_driver(driver, sizes, most_calls):
    chance, budget = random.Random(3), 2000 * PAGE
    memory, kept, used = pinned.PinnedMemory(budget), deque(), 0
    for turn in range(1000):
        if turn == 400:
            driver.calls = 0
        num_bytes = chance.choice(sizes) * PAGE
        kept.append(memory.pin(AdapterImage(LAYOUT, torch.zeros(1, 1, num_bytes, dtype=torch.uint8))))
        used += num_bytes
        while used > budget:
            used -= kept.popleft().num_bytes
        assert memory.num_bytes <= budget * 9 / 8
    assert driver.calls <= most_calls * 600


def test_a_budget_of_images_of_one_size_is_turned_over_without_the_driver(driver):
    memory = pinned.PinnedMemory(8 * 4 * PAGE)
    kept = deque(memory.pin(image) for image in images(*[4 * PAGE] * 8))
    calls = driver.calls
    kept.append(memory.pin(images(4 * PAGE)[0]))  # as a tier does: the new one comes before an old one goes
    for turn in range(50):
        kept.popleft()
        kept.append(memory.pin(AdapterImage(LAYOUT, torch.full((1, 1, 4 * PAGE), turn, dtype=torch.uint8))))
    assert driver.calls == calls + 1
    assert [int(image.data.unique()) for image in list(kept)[1:]] == list(range(42, 50))


def test_blocks_go_with_the_memory_and_the_last_image(driver):
    memory = pinned.PinnedMemory(2**30)
    kept, gone = (memory.pin(image) for image in images(PAGE, PAGE))
    del gone
    gc.collect()
    assert len(driver.ranges) == 2
    del memory
    gc.collect()
    assert [*driver.ranges] == [kept.data.data_ptr()]
    del kept
    gc.collect()
    assert not driver.ranges


def test_images_that_come_and_go_on_many_threads_keep_what_they_hold(driver):
    memory = pinned.PinnedMemory(60 * PAGE)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        kept: list[tuple[int, AdapterImage]] = []
        for i in range(200):
            value, pages = (7 * seed + i) % 251, chance.choice([1, 2, 3])
            data = torch.full((1, 1, pages * PAGE), value, dtype=torch.uint8)
            kept.append((value, memory.pin(AdapterImage(LAYOUT, data))))
            if len(kept) > 4:
                value, image = kept.pop(chance.randrange(len(kept)))
                assert bool((image.data == value).all())

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result()
    gc.collect()
    assert sum(map(len, driver.ranges.values())) * PAGE == memory.num_bytes <= 60 * PAGE * 9 / 8


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_an_image_that_the_driver_refuses_stays_as_it_is_and_leaves_no_error(driver, memory, monkeypatch):
    forgotten = []
    monkeypatch.setattr(pinned, "_forget_error", lambda: forgotten.append(True))
    driver.refuses = True
    image = images(PAGE)[0]
    assert memory.pin(image) is image
    assert forgotten == [True]
    assert (driver.ranges, memory.num_bytes) == ({}, 0)


def test_an_image_for_which_there_is_no_memory_elsewhere_stays_as_it_is(driver, memory, monkeypatch):
    def none_left(*_, **__):
        raise OSError(12, "no memory")

    monkeypatch.setattr(pinned.mmap, "mmap", none_left)
    image = images(PAGE)[0]
    assert memory.pin(image) is image
    assert (driver.ranges, memory.num_bytes) == ({}, 0)


def test_an_empty_image_is_left_alone(driver, memory):
    image = AdapterImage(LAYOUT, torch.zeros(0, 2, 4))
    assert memory.pin(image) is image
    assert not driver.ranges


def test_a_buffer_is_registered_whole_for_as_long_as_it_lives(driver):
    memory = registered("swap_memory", 5 * PAGE + 100)
    assert (memory.nbytes, memory.dtype) == (5 * PAGE + 100, torch.uint8)
    assert [len(pages) for pages in driver.ranges.values()] == [6]
    del memory
    gc.collect()
    assert not driver.ranges


def test_a_buffer_that_cannot_be_had_is_refused_by_the_setting_that_asks_for_it(driver):
    with pytest.raises(ConfigError, match=f"swap_memory: {2**62} bytes of host memory cannot be had"):
        registered("swap_memory", 2**62)
    driver.refuses = True
    with pytest.raises(ConfigError, match=r"swap_memory: the driver does not register .*: give less, or 0"):
        registered("swap_memory", PAGE)
