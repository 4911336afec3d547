"""What the log says when an API process stops: how many requests are open, and that they ended or were cut."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import FakeEngine, serving
from tests.support.waiting import WAIT_S, eventually


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """(message, fields) of what API processes have said."""
    records = [record for record in caplog.records if record.name == "interleaf.server.api"]
    return [(record.getMessage(), record.fields) for record in records]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_says_how_many_requests_are_open_and_what_became_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """The open request is a load that the engine holds up: until the server stops, or for ever."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    caplog.set_level(logging.INFO, "interleaf")
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine())
        engines[0].loading.clear()
        return engines[0]

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            try:
                answers.append(
                    client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "adapter"}).status_code
                )
            except httpx.HTTPError as error:
                answers.append(type(error).__name__)

    def let_it_end() -> None:
        eventually(lambda: lines(caplog))
        engines[0].loading.set()

    answers: list[object] = []
    threads = []
    drain = WAIT_S if ends else 1.0
    with serving(make, adapters_dir=str(tmp_path), allow_runtime_loading=True, drain_timeout=drain) as (url, _):
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()
        eventually(lambda: engines[0].num_loading == 1)
        if ends:
            threads.append(threading.Thread(target=let_it_end))
            threads[1].start()
    for thread in threads:
        thread.join(WAIT_S)
    (first, begun), (last, ended) = lines(caplog)
    assert first == "stopping: no new connection is taken"
    assert begun == {"process": "api", "open_requests": 1, "drain_timeout_s": drain}
    assert last == ("drained" if ends else "open requests are cut")
    assert ended["cut_requests"] == (0 if ends else 1)
    assert (answers == [200]) == ends
