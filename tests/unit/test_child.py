"""What a child process does when it is ready, without a process."""

from __future__ import annotations

import gc
import os

import msgspec

from interleaf.engine.child import Parent
from interleaf.engine.messages import Report, Started


def test_what_start_up_has_made_is_left_out_of_later_garbage_collections() -> None:
    reports, end = os.pipe()
    parent = object.__new__(Parent)
    parent._reports = end
    old = [[object()] for _ in range(100)]
    try:
        parent.started("copies at 4 GB/s")
        assert gc.get_freeze_count() > len(old)
        tracked = {id(found) for found in gc.get_objects()}
        assert not any(id(mine) in tracked for mine in old)
    finally:
        gc.unfreeze()
    message = os.read(reports, 4096)
    assert msgspec.msgpack.decode(message[4:], type=Report) == Started("copies at 4 GB/s")
    os.close(reports)
    os.close(end)
