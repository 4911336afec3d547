"""Images registered with a driver that takes whole memory pages, once each, as CUDA's does."""

import gc
import mmap

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

    def cudaHostRegister(self, first: int, num_bytes: int, flags: int) -> int:
        pages = range(first // PAGE, -(-(first + num_bytes) // PAGE))
        if self.refuses or any(page in taken for taken in self.ranges.values() for page in pages):
            return 712
        self.ranges[first] = pages
        return 0

    def cudaHostUnregister(self, first: int) -> int:
        del self.ranges[first]
        return 0


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


def test_neighbours_on_the_heap_are_all_registered_and_share_no_page(driver):
    before = images(3 * PAGE, 100, 5 * PAGE + 64, 2**20)
    after = [pinned.pin(image) for image in before]
    assert len(driver.ranges) == 4
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.data, other.data)
        assert other.layout is one.layout
        pages = driver.ranges[other.data.data_ptr()]
        assert len(pages) == -(-other.num_bytes // PAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [2**21 - PAGE, 2**21, 5 * 2**20 + 4 * PAGE])
def test_an_image_of_another_process_is_moved_too_and_begins_at_a_huge_page_if_it_fills_one(driver, dtype, num_bytes):
    mapping = mmap.mmap(-1, num_bytes + PAGE)
    data = torch.frombuffer(mapping, dtype=dtype, offset=PAGE).view(4, 2, -1)
    data.copy_(torch.arange(data.numel()).view(data.shape) % 251)
    image = pinned.pin(AdapterImage(LAYOUT, data))
    assert torch.equal(image.data, data)
    assert [*driver.ranges] == [image.data.data_ptr()] != [data.data_ptr()]
    assert [len(pages) for pages in driver.ranges.values()] == [num_bytes // PAGE]
    assert image.data.data_ptr() % (2**21 if num_bytes >= 2**21 else PAGE) == 0
    assert image.data.is_contiguous()


def test_room_to_begin_at_a_huge_page_takes_no_memory(driver):
    before = resident_bytes()
    kept = [pinned.pin(image) for image in images(*[2**21 + 4096] * 16)]
    assert resident_bytes() - before < 1.2 * 16 * 2**21 + 16 * 2**21 + 2**22  # the images, those they were made of
    assert len(kept) == len(driver.ranges)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def test_it_is_let_go_with_the_image(driver):
    image = pinned.pin(images(PAGE)[0])
    assert driver.ranges
    del image
    gc.collect()
    assert not driver.ranges


def test_an_image_that_the_driver_refuses_stays_as_it_is_and_leaves_no_error(driver, monkeypatch):
    forgotten = []
    monkeypatch.setattr(pinned, "_forget_error", lambda: forgotten.append(True))
    driver.refuses = True
    image = images(PAGE)[0]
    assert pinned.pin(image) is image
    assert forgotten == [True]
    assert not driver.ranges


def test_an_image_for_which_there_is_no_memory_elsewhere_stays_as_it_is(driver, monkeypatch):
    def none_left(data):
        raise OSError(12, "no memory")

    monkeypatch.setattr(pinned, "_moved", none_left)
    image = images(PAGE)[0]
    assert pinned.pin(image) is image
    assert not driver.ranges


def test_an_empty_image_is_left_alone(driver):
    image = AdapterImage(LAYOUT, torch.zeros(0, 2, 4))
    assert pinned.pin(image) is image
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
