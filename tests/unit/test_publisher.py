"""The publisher against an engine and an API process that the test plays: what waits for what, and what does not."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid, ModelSpec, StreamOrder
from interleaf.engine import messages as m
from interleaf.engine import publisher as room
from interleaf.engine.channel import ENGINE_SOCKET, PUBLISHER_SOCKET, Endpoint, Link
from interleaf.engine.publisher import Publisher
from interleaf.errors import AdapterNameTaken
from interleaf.memory.geometry import PageGeometry
from tests.support.peft_folders import MODEL
from tests.support.waiting import eventually

SPEC = dataclasses.replace(ModelSpec(**MODEL), eos_token_ids=(2,))
GEOMETRY = PageGeometry(4, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 4)


def source(seed: int) -> str:
    return f"dummy:r=4,targets=q+v,seed={seed}"


class Gates:
    """Holds the reading of some sources back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shut: dict[str, threading.Event] = {}
        self.begun: list[str] = []
        read = room.open_adapter

        def gated(name: str, spec: ModelSpec) -> Any:
            self.begun.append(name)
            if name in self.shut:
                assert self.shut[name].wait(60)
            return read(name, spec)

        monkeypatch.setattr(room, "open_adapter", gated)

    def shut_for(self, name: str) -> threading.Event:
        return self.shut.setdefault(name, threading.Event())


class World:
    """A publisher on a thread, with the ends that others hold."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        (folder / "slabs").mkdir()
        self.engine = Endpoint(str(folder / ENGINE_SOCKET))
        self.to_engine: list[Any] = []
        self.answers: list[Any] = []
        self.publisher: Publisher | None = None
        self.thread = threading.Thread(target=self._run, args=(folder, num_threads))
        self.thread.start()
        (hello,) = self.hear_engine(lambda: len(self.to_engine) == 1)
        assert hello == m.Hello("publisher")
        self.say(m.WelcomePublisher(SPEC, GEOMETRY, "float32", StreamOrder.ROWS, ()))
        eventually(lambda: (folder / f"{PUBLISHER_SOCKET}.life").exists())
        self.api = Link(str(folder / PUBLISHER_SOCKET))

    def _run(self, folder: Path, num_threads: int) -> None:
        self.publisher = Publisher(folder, folder / "slabs", num_threads)
        self.publisher.run()
        self.publisher.close()

    def hear_engine(self, enough: Callable[[], bool]) -> list[Any]:
        """All that the engine has been told, once that is enough."""

        def heard() -> bool:
            self.engine.wait(0.05)
            self.to_engine += [msgspec.msgpack.decode(data, type=m.ToEngine) for _, data in self.engine.receive()]
            return enough()

        eventually(heard)
        return self.to_engine

    def registered(self, count: int) -> list[m.Register]:
        """So many registrations, or more."""

        def found() -> list[m.Register]:
            return [message for message in self.to_engine if isinstance(message, m.Register)]

        self.hear_engine(lambda: len(found()) >= count)
        return found()

    def say(self, message: m.Message) -> None:
        """The engine speaks."""
        self.engine.send(self.engine.peers()[0], m.encode(message))

    def ask(self, *calls: m.Message) -> None:
        """An API process speaks."""
        for call in calls:
            self.api.send(m.encode(call))

    def answer(self, call: int) -> Any:
        """What it has been answered."""
        found: list[Any] = []

        def heard() -> bool:
            self.api.wait(0.05)
            self.answers += [msgspec.msgpack.decode(data, type=m.FromPublisher) for data in self.api.receive()]
            of_call = [answer for answer in self.answers if getattr(answer, "call", None) == call]
            found[:] = [answer for answer in of_call if not isinstance(answer, m.Taken)]
            return bool(found)

        eventually(heard)
        return found[0]

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.stop()
        self.thread.join(60)
        self.api.close()
        self.engine.close()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    return Gates(monkeypatch)


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("p"), num_threads=2)
    yield world
    for gate in gates.shut.values():
        gate.set()
    world.close()


def test_a_load_is_said_to_be_taken_up_before_it_is_answered(world: World, gates: Gates) -> None:
    gates.shut_for(source(1))
    world.ask(m.Load(1, "slow", source(1)))

    def taken() -> bool:
        world.api.wait(0.05)
        world.answers += [msgspec.msgpack.decode(data, type=m.FromPublisher) for data in world.api.receive()]
        return world.answers == [m.Taken(1)]

    eventually(taken)


def test_a_source_that_hangs_holds_up_no_other_adapter_and_no_answer(world: World, gates: Gates) -> None:
    gate = gates.shut_for(source(1))
    world.ask(m.Load(1, "slow", source(1)), m.Load(2, "quick", source(2)), m.AskNames(3))
    assert world.answer(3).uids == {}
    (register,) = world.registered(1)
    world.say(m.Done(register.call))
    assert world.answer(2) == m.Loaded(2, register.uid)
    world.ask(m.Unload(4, "quick"))
    assert world.answer(4) == m.Done(4)
    gate.set()
    _, late = world.registered(2)
    world.say(m.Done(late.call))
    assert world.answer(1) == m.Loaded(1, late.uid)


def test_as_many_are_read_at_a_time_as_there_are_threads(world: World, gates: Gates) -> None:
    held = [gates.shut_for(source(seed)) for seed in (1, 2, 3)]
    world.ask(*(m.Load(seed, f"a{seed}", source(seed)) for seed in (1, 2, 3)))
    eventually(lambda: len(gates.begun) == 2)
    world.ask(m.AskNames(9))
    world.answer(9)
    assert sorted(gates.begun) == [source(1), source(2)]
    held[1].set()
    eventually(lambda: len(gates.begun) == 3)


def test_of_two_that_want_a_name_at_once_one_gets_it(world: World, gates: Gates) -> None:
    gate = gates.shut_for(source(1))
    world.ask(m.Load(1, "name", source(1)), m.Load(2, "name", source(2)))
    (second,) = world.registered(1)
    gate.set()
    first = world.registered(2)[1]  # neither was named when it was read
    world.say(m.Done(second.call))
    world.say(m.Done(first.call))
    assert world.answer(2) == m.Loaded(2, second.uid)
    assert isinstance(world.answer(1).error.exception(), AdapterNameTaken)
    world.hear_engine(lambda: m.Withdraw(first.uid) in world.to_engine)
    world.ask(m.Load(3, "name", source(3)))
    assert isinstance(world.answer(3).error.exception(), AdapterNameTaken)


def test_what_goes_wrong_on_a_thread_is_the_answer_of_that_call_alone(world: World, tmp_path: Path) -> None:
    world.ask(m.Load(1, "absent", str(tmp_path / "nowhere")), m.Load(2, "bad", "dummy:r=0"), m.Load(3, "a", source(3)))
    assert "nowhere" in world.answer(1).error.message
    assert "r=0" in world.answer(2).error.message or "dummy:r=0" in world.answer(2).error.message
    (register,) = world.registered(1)
    world.say(m.Failed(register.call, m.WireError.of(RuntimeError("the pool is too small"))))
    assert "too small" in world.answer(3).error.message


def test_fetches_are_answered_as_they_come_and_failures_say_why(world: World, gates: Gates, tmp_path: Path) -> None:
    gate = gates.shut_for(source(1))
    uid = AdapterUid("ab" * 32)
    world.say(m.Fetch(uid, source(1)))
    world.say(m.Fetch(uid, str(tmp_path / "gone")))

    def fetched() -> list[m.Fetched]:
        return [message for message in world.to_engine if isinstance(message, m.Fetched)]

    world.hear_engine(lambda: len(fetched()) == 1)
    assert "gone" in (fetched()[0].failure or "")
    gate.set()
    world.hear_engine(lambda: len(fetched()) == 2)
    assert "has changed" in (fetched()[1].failure or "")


def test_what_requests_wait_for_is_not_read_behind_adapters_that_somebody_registers(world: World, gates: Gates) -> None:
    held = [gates.shut_for(source(seed)) for seed in (1, 2)]
    world.ask(*(m.Load(seed, f"a{seed}", source(seed)) for seed in (1, 2, 3)))
    eventually(lambda: len(gates.begun) == 2)
    uid = open_adapter(source(9), SPEC).uid
    world.say(m.Fetch(uid, source(9)))
    fetched = [
        message for message in world.hear_engine(lambda: bool(world.to_engine[1:])) if message != m.Hello("publisher")
    ]
    assert [(message.uid, message.failure) for message in fetched] == [(uid, None)]
    for gate in held:
        gate.set()


def test_it_ends_with_what_it_is_working_on_and_begins_nothing_more(world: World, gates: Gates) -> None:
    held = [gates.shut_for(source(seed)) for seed in range(4)]
    world.ask(*(m.Load(seed, f"a{seed}", source(seed)) for seed in range(4)))
    eventually(lambda: len(gates.begun) == 2)
    assert world.publisher is not None
    world.publisher.stop()
    eventually(lambda: world.publisher and world.publisher._threads._shutdown)
    for gate in held:
        gate.set()
    world.thread.join(60)
    assert not world.thread.is_alive()
    assert len(gates.begun) == 2
