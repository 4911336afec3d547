"""What the log says when an API process stops: how many requests are open, and that they ended or were cut."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import served
from tests.support.served import FakeEngine, serving
from tests.support.waiting import WAIT_S, eventually


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """(message, fields) of what API processes have said."""
    records = [record for record in caplog.records if record.name == "interleaf.server.api"]
    return [(record.getMessage(), record.fields) for record in records]  # type: ignore[attr-defined]


class HeldLoad:
    """A server with one open request: a load that its engine holds up."""

    def __init__(self, folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text("{}")
        self.settings = {"adapters_dir": str(folder), "allow_runtime_loading": True}
        self.engine: FakeEngine | None = None
        self.answers: list[object] = []

    def make(self) -> FakeEngine:
        self.engine = FakeEngine()
        self.engine.loading.clear()
        return self.engine

    def ask(self, url: str) -> threading.Thread:
        """Returns: the client, whose request the engine has."""
        client = threading.Thread(target=self._ask, args=(url,))
        client.start()
        eventually(lambda: self.engine is not None and self.engine.num_loading == 1)
        return client

    def let_it_end(self) -> None:
        assert self.engine is not None
        self.engine.loading.set()

    def _ask(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            try:
                body = {"lora_name": "a", "lora_path": "adapter"}
                self.answers.append(client.post("/v1/load_lora_adapter", json=body).status_code)
            except httpx.HTTPError as error:
                self.answers.append(type(error).__name__)


@pytest.fixture
def held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> HeldLoad:
    caplog.set_level(logging.INFO, "interleaf")
    return HeldLoad(tmp_path)


@pytest.mark.parametrize("ends", [True, False])
def test_a_stop_says_how_many_requests_are_open_and_what_became_of_them(
    held: HeldLoad, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """The open request goes on until the server stops, or for ever."""

    def let_it_end() -> None:
        eventually(lambda: lines(caplog))
        held.let_it_end()

    drain = WAIT_S if ends else 1.0
    with serving(held.make, drain_timeout=drain, **held.settings) as (url, _):
        threads = [held.ask(url)]
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
    assert (held.answers == [200]) == ends
    assert [record for record in caplog.records if record.exc_info] == [], "to be cut is no failure of the server's"


def test_what_a_second_signal_finds_open_is_cut_though_the_end_of_the_engine_ends_it(
    held: HeldLoad, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes get that signal, so that requests may end before this one has looked again."""
    servers: list[Any] = []
    make = served.http_server
    monkeypatch.setattr(served, "http_server", lambda *a: servers.append(make(*a)) or servers[0])  # type: ignore[func-returns-value]
    with serving(held.make, drain_timeout=WAIT_S, **held.settings) as (url, _):
        client = held.ask(url)
        servers[0]._on_signal()
        eventually(lambda: lines(caplog))
        servers[0]._on_signal()
        held.let_it_end()
    client.join(WAIT_S)
    (_, begun), (last, ended) = lines(caplog)
    assert begun["open_requests"] == 1
    assert (last, ended["cut_requests"]) == ("open requests are cut", 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
