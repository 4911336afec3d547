"""Copies beside the steps: what is reported, when, and whose failure a failure is."""

from __future__ import annotations

import pytest
import torch

from interleaf.adapters.copy import LoadReport, StreamCopier
from interleaf.adapters.image import AdapterImage
from interleaf.core import AdapterLoad, AdapterUid, PooledLayout
from interleaf.memory.geometry import PageGeometry
from interleaf.memory.pool import PagePool
from tests.support.host_device import HostDevice, HostEvent

GEOMETRY = PageGeometry(page_tokens=1, num_layers=1, num_kv_heads=1, head_dim=16, itemsize_bytes=4)
SOUND, TORN = AdapterUid("sound"), AdapterUid("torn")
PAGES = (1, 2, 5)
"""Two runs of neighbours: two copies."""


class BrokenEvent(HostEvent):
    def record(self) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def image(uid: AdapterUid) -> AdapterImage:
    """Of three pages; of the torn one the last page, and the second copy with it, cannot be had."""
    data = torch.ones(len(PAGES), 1, GEOMETRY.lane_elems)
    layout = PooledLayout((), (None,), len(PAGES), 0)
    return AdapterImage(layout, data if uid == SOUND else data[:2])


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


def test_a_device_that_is_gone_is_not_one_adapters_trouble(pool: PagePool) -> None:
    device = HostDevice()
    events = iter([HostEvent(device), BrokenEvent(device)])
    device.event = lambda: next(events)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="ECC"):
        StreamCopier(pool, image, device).copy(AdapterLoad(TORN, PAGES))
