"""Copies beside the steps: what is reported, when, and whose failure a failure is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from interleaf.adapters.copy import LoadReport, StreamCopier
from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterLoad, AdapterUid, PooledLayout
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from tests.support.host_device import HostDevice, HostEvent

GEOMETRY = PageGeometry(page_tokens=1, num_layers=1, num_kv_heads=1, head_dim=16, itemsize_bytes=4)
SOUND, LATER, TORN = AdapterUid("sound"), AdapterUid("later"), AdapterUid("torn")
PAGES = (1, 2, 5)
"""Two runs of neighbours: two copies."""


class BrokenEvent(HostEvent):
    def record(self) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def image(uid: AdapterUid) -> AdapterImage:
    """Of three pages; of the torn one the last page, and the second copy with it, cannot be had."""
    data = torch.ones(len(PAGES), 1, GEOMETRY.lane_elems)
    layout = PooledLayout((), (None,), len(PAGES), 0)
    return AdapterImage(layout, data if uid != TORN else data[:2])


@pytest.fixture
def pool() -> PagePool:
    return PagePool(GEOMETRY, 8, torch.float32)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def copier(pool: PagePool, device: HostDevice) -> StreamCopier:
    return StreamCopier(pool, image, device)


def test_a_copy_fills_its_pages_and_no_others_and_is_reported_once(copier: StreamCopier, pool: PagePool) -> None:
    layout = copier.copy(AdapterLoad(SOUND, PAGES))
    assert layout == image(SOUND).layout
    assert [page for page in range(8) if pool.lanes[page].any()] == [*PAGES]
    assert copier.poll() == [LoadReport(SOUND)]
    assert copier.poll() == []


def test_a_copy_that_is_refused_fails_its_load_and_no_other(copier: StreamCopier) -> None:
    assert copier.copy(AdapterLoad(TORN, PAGES)) is None
    assert copier.copy(AdapterLoad(SOUND, (3, 4, 6))) is not None
    torn, sound = copier.poll()
    assert torn.uid == TORN
    assert torn.error is not None
    assert "adapter torn could not be copied to the device" in torn.error
    assert sound == LoadReport(SOUND)


def test_its_pages_are_not_given_back_while_what_was_begun_still_writes_to_them(
    copier: StreamCopier, device: HostDevice
) -> None:
    device.holds_copies = True
    copier.copy(AdapterLoad(TORN, PAGES))
    assert copier.poll() == []
    device.holds_copies = False
    assert [report.uid for report in copier.poll()] == [TORN]


def test_a_copy_that_will_have_ended_is_reported_once_and_later_steps_wait_for_it(
    copier: StreamCopier, device: HostDevice
) -> None:
    events: list[HostEvent] = []
    device.event = lambda: events.append(HostEvent(device)) or events[-1]  # type: ignore[func-returns-value, method-assign]
    device.holds_copies = True
    copier.copy(AdapterLoad(SOUND, PAGES))
    copier.copy(AdapterLoad(LATER, (3, 4, 6)))
    _, first, _, second = events  # what was launched before each copy, and the copy's end
    assert copier.poll(2) == []
    assert copier.poll(5) == [LoadReport(SOUND)], "three pages are the first copy's; five do not reach the second's end"
    assert (first.num_waits, second.num_waits) == (1, 0)
    assert copier.poll(5) == []
    assert copier.poll(6) == [LoadReport(LATER)]
    assert (first.num_waits, second.num_waits) == (1, 1)
    device.holds_copies = False
    assert copier.poll() == []
    assert copier.num_under_way == 0


def test_a_copy_that_has_yet_to_wait_for_a_step_is_not_reported_ahead_of_its_end_nor_is_any_behind_it(
    copier: StreamCopier, device: HostDevice
) -> None:
    device.holds_copies = device.holds_steps = True
    copier.copy(AdapterLoad(SOUND, PAGES))
    copier.copy(AdapterLoad(LATER, (3, 4, 6)))
    assert copier.poll(100) == [], "however fast the link is, the step that still reads the pages is not over"
    device.holds_steps = False
    assert copier.poll(100) == [LoadReport(SOUND), LoadReport(LATER)]


def test_an_image_is_kept_until_its_copy_has_ended_though_it_was_reported(pool: PagePool, device: HostDevice) -> None:
    images = {SOUND: image(SOUND)}
    memory = weakref.ref(images[SOUND].data)
    copier = StreamCopier(pool, images.__getitem__, device)
    device.holds_copies = True
    copier.copy(AdapterLoad(SOUND, PAGES))
    assert copier.poll(3) == [LoadReport(SOUND)]
    images.clear()  # the host tier may let go of what has been reported
    gc.collect()
    assert memory() is not None
    device.holds_copies = False
    copier.poll()
    gc.collect()
    assert memory() is None


def test_what_was_refused_is_not_reported_before_its_end_and_holds_up_nobody(
    copier: StreamCopier, device: HostDevice
) -> None:
    device.holds_copies = True
    copier.copy(AdapterLoad(TORN, PAGES))
    copier.copy(AdapterLoad(SOUND, (3, 4, 6)))
    assert copier.poll(6) == [LoadReport(SOUND)]
    device.holds_copies = False
    assert [report.uid for report in copier.poll()] == [TORN]


def test_a_device_that_is_gone_is_not_one_adapters_trouble(pool: PagePool) -> None:
    device = HostDevice()
    events = iter([HostEvent(device), BrokenEvent(device)])
    device.event = lambda: next(events)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="ECC"):
        StreamCopier(pool, image, device).copy(AdapterLoad(TORN, PAGES))
