"""When a step may be put off for whoever comes meanwhile, and that the engine's process then listens first."""

from __future__ import annotations

from typing import Any

import pytest

from interleaf.core import AdapterUid, Request, SamplingParams
from interleaf.engine import process
from interleaf.engine.process import EngineServer
from tests.support.fake_engine import FakeSystem


def submit(system: FakeSystem, id_: str, adapter: str | None = None, max_tokens: int = 20) -> None:
    uid = None if adapter is None else AdapterUid(adapter)
    request = Request(id=id_, prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=max_tokens), adapter=uid)
    system.engine.submit(request, frozenset(), seed=1)


def spare_after_a_step(*ids: str, **settings: Any) -> tuple[FakeSystem, float]:
    """With the runner's word for half a second, and requests that decode."""
    system = FakeSystem(**settings)
    system.runner.spare = 0.5
    for id_ in ids:
        submit(system, id_)
    for _ in range(3):
        system.engine.step()
    return system, system.engine.spare_s


def test_a_step_may_wait_while_another_runs_and_seats_are_free() -> None:
    assert spare_after_a_step("a")[1] == 0.5


def test_nobody_waits_where_nothing_runs() -> None:
    system, spare_s = spare_after_a_step()
    assert spare_s == 0
    submit(system, "a")
    assert system.engine.spare_s == 0


def test_nor_without_overlap_where_every_step_has_been_read() -> None:
    assert spare_after_a_step("a", lookahead=0)[1] == 0


def test_nor_where_somebody_has_come_already() -> None:
    system, spare_s = spare_after_a_step("a")
    assert spare_s == 0.5
    submit(system, "b")
    assert system.engine.spare_s == 0
    system.engine.step()
    assert system.engine.spare_s == 0.5


def test_nor_while_somebody_waits_for_an_adapter() -> None:
    system, spare_s = spare_after_a_step("a", adapters={"slow": 2})
    assert spare_s == 0.5
    system.images.on_disk.add("slow")
    submit(system, "b", "slow")
    for _ in range(3):
        assert system.engine.spare_s == 0
        system.engine.step()


def test_nor_without_a_seat_for_whoever_came() -> None:
    assert spare_after_a_step("a", "b", max_num_seqs=2)[1] == 0


def test_nor_while_prompts_fill_the_steps() -> None:
    system = FakeSystem(max_batch_tokens=4)
    system.runner.spare = 0.5
    params = SamplingParams(max_tokens=20)
    system.engine.submit(Request(id="long", prompt_token_ids=(1,) * 13, params=params), frozenset(), seed=1)
    spared = []
    for _ in range(6):
        system.engine.step()
        spared.append(system.engine.spare_s)
    assert spared == [0, 0, 0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("running", "spare_s"), [(1, 0.5), (2, 0.5), (3, 0.0)])
def test_nor_where_prompts_wait_for_a_group_of_seats(running: int, spare_s: float) -> None:
    assert spare_after_a_step(*"abcd"[:running], max_num_seqs=4, refill_seats=2)[1] == spare_s


def test_nor_when_the_engine_has_failed() -> None:
    system = FakeSystem()
    system.runner.spare, system.runner.fail_at_step = 0.5, 1
    submit(system, "a")
    for _ in range(4):
        system.engine.step()
    assert not system.engine.is_alive
    assert system.engine.spare_s == 0


class Rooms:
    """What a turn of the engine's process calls, noted in order."""

    def __init__(self, spare_s: float, messages: list[tuple[str, bytes]]) -> None:
        self.calls: list[object] = []
        self.spare_s, self.has_work, self.has_backlog, self.messages = spare_s, True, False, messages
        self._endpoint = self._client = self
        self._stopping = self.stops = False

    def wait(self, seconds: float) -> None:
        self.calls.append(("wait", seconds))
        self._stopping = self.stops

    def receive(self) -> list[tuple[str, bytes]]:
        return self.messages

    def departed(self) -> list[str]:
        return []

    def poll(self) -> list[str]:
        self.calls.append("step")
        return ["token"]

    def flush(self) -> None:
        self.calls.append("flush")

    def _handle(self, peer: str, data: bytes) -> None:
        self.calls.append(data)

    def _deliver(self, events: list[str]) -> None:
        self.calls.append(events)

    def _ask_for_slabs(self) -> None:
        pass


@pytest.mark.parametrize("spare_s", [0.0, process._SHORTEST_WAIT_S / 2, 0.004])
def test_the_process_takes_what_comes_in_the_time_to_spare_into_its_next_step(spare_s: float) -> None:
    rooms = Rooms(spare_s, [("peer", b"a request")])
    EngineServer.turn(rooms)  # type: ignore[arg-type]
    waited = [("wait", spare_s)] if spare_s >= process._SHORTEST_WAIT_S else []
    assert rooms.calls == [*waited, b"a request", "step", ["token"], "flush"]


@pytest.mark.parametrize("has_work", [True, False])
def test_a_process_that_is_stopped_while_it_waits_begins_no_step_but_hears_who_came(has_work: bool) -> None:
    rooms = Rooms(0.004, [("peer", b"a request")])
    rooms.stops, rooms.has_work = True, has_work
    EngineServer.turn(rooms)  # type: ignore[arg-type]
    assert rooms.calls == [("wait", 0.004 if has_work else process._IDLE_WAIT_S), b"a request", "flush"]
