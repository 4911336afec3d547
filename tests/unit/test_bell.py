"""A bell ends the wait of the thread that listens, however often and whenever it is rung."""

from __future__ import annotations

import threading
from pathlib import Path

from interleaf.engine.bell import Bell
from interleaf.engine.channel import Endpoint


def test_a_ring_ends_a_wait_that_nothing_else_would(tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    folder: Path = tmp_path_factory.mktemp("b")
    endpoint, bell = Endpoint(str(folder / "e")), Bell()
    waiting = threading.Thread(target=endpoint.wait, args=(3600.0, bell))
    waiting.start()
    bell.ring()
    waiting.join(60)
    assert not waiting.is_alive()
    endpoint.wait(3600.0, bell)  # it has not been hushed
    bell.hush()
    endpoint.wait(0.01, bell)
    for _ in range(100_000):  # more than a socket holds: nobody waits for whoever does not listen
        bell.ring()
    bell.hush()
    bell.ring()
    endpoint.wait(3600.0, bell)
    endpoint.close()
    bell.close()
    bell.ring()  # by a thread that does not know yet
