"""A server in processes: the same answers as in one process, and every kind of death as it is promised."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from interleaf import LLM, SamplingParams
from interleaf.core import Event, RequestAborted, RequestFailed, RequestFinished, TokenEvent
from interleaf.engine.remote import RemoteEngine
from interleaf.errors import (
    AdapterNameTaken,
    AdapterNotFound,
    AdapterRejected,
    EngineDead,
    PoolTooSmall,
    RequestRejected,
)
from tests.conftest import REPOSITORY
from tests.support.asynchronous import asynchronous
from tests.support.line_server import LineClient
from tests.support.processes import command, descendants, is_running
from tests.support.tiny_models import make_model, save_model
from tests.support.waiting import WAIT_S, eventually

ADAPTERS = {f"a{i}": f"dummy:r={4 + 4 * i},targets=all,seed={i}" for i in range(3)}
CONFIG: dict[str, Any] = {"memory": "4MiB", "page_tokens": 4, "max_num_seqs": 16, "max_batch_tokens": 64, "seed": 0}
LOAD, LOAD_TOKENS = 120, 240
"""Requests that keep the engine busy, and the tokens of each: thousands of steps, so that no test is slower."""


class Server:
    """A running server: its processes, its folders."""

    def __init__(self, model: Path, folder: Path, /, *, wait: bool = True, **settings: Any) -> None:
        self.slabs = folder / "slabs"
        self.temporary = folder / "tmp"
        self.slabs.mkdir()
        self.temporary.mkdir()
        settings = {"model": str(model), "config": CONFIG, "adapters": ADAPTERS, "slab_dir": str(self.slabs)} | settings
        paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.serve_lines", json.dumps(settings)],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=os.environ
            | {
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
            },
        )
        assert self.process.stdout is not None
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline()) if wait else {}
        self.all_pids = set(descendants(self.process.pid))

    @property
    def run(self) -> Path:
        (run,) = self.temporary.glob("interleaf-*")
        return run

    def ask(self, **asked: Any) -> LineClient:
        return LineClient(self.said["port"], **asked)

    def look(self) -> dict[str, Any]:
        (seen,) = self.ask(do="look").lines()
        return seen

    def pids(self, role: str) -> list[int]:
        """The processes of a role: one, or none for a moment."""
        pids = [pid for pid in descendants(self.process.pid) if f" {role} " in command(pid)]
        self.all_pids.update(pids)
        return pids

    def kill(self, role: str) -> None:
        """Kill the process of a role."""
        (pid,) = self.pids(role)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.pids(role) != [pid])

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def assert_nothing_is_left(self) -> None:
        eventually(lambda: not any(is_running(pid) for pid in self.all_pids))
        eventually(lambda: list(self.slabs.iterdir()) == [] and list(self.temporary.glob("interleaf-*")) == [])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(WAIT_S)
            finally:
                self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def write_adapter(folder: Path, seed: int) -> Path:
    """A PEFT folder with an adapter of rank 2 on one layer of the tiny model; an older one there is replaced."""
    generator = torch.Generator().manual_seed(seed)
    key = "base_model.model.model.layers.1.self_attn.q_proj"
    shapes = {f"{key}.lora_A.weight": (2, 64), f"{key}.lora_B.weight": (64, 2)}
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [1]}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that leave it as they found it. Its host tier holds fewer adapters than it has."""
    server = Server(model, tmp_path_factory.mktemp("server"), config=CONFIG | {"adapter_host_memory": "1MiB"})
    yield server
    server.close()
    assert server.process.returncode == 0
    server.assert_nothing_is_left()


@pytest.fixture
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    servers = []

    def start(**settings: Any) -> Server:
        server = Server(model, tmp_path_factory.mktemp("server"), **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[RemoteEngine]:
    """This process as one more API process."""
    engine = await RemoteEngine.connect(server.run)
    try:
        yield engine
    finally:
        await engine.close()


async def collect(stream: AsyncIterator[list[Event]]) -> list[Event]:
    return [event async for events in stream for event in events]


def tokens(events: list[Event]) -> tuple[int, ...]:
    return tuple(event.token_id for event in events if isinstance(event, TokenEvent))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def idle(engine: RemoteEngine) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await engine.stats()).pool.kv_pages:
            pass


async def nothing_is_registered_but_the_shared(engine: RemoteEngine) -> None:
    """The publisher answers that a name is gone before the engine has heard of it."""
    async with asyncio.timeout(WAIT_S):
        while (await engine.stats()).registered_adapters != len(ADAPTERS):
            pass


@contextmanager
def load(server: Server) -> Iterator[list[LineClient]]:
    """Requests for all adapters, all of them with the engine; the first has begun and most have to wait."""
    before = server.look()["generated"]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(server.ask(do="generate", prompt=[5, i], max_tokens=LOAD_TOKENS, adapter=f"a{i % 3}"))
            for i in range(LOAD)
        ]
        assert clients[0].line()

        def arrived() -> int:
            seen = server.look()
            return seen["sequences"] + seen["generated"] - before

        eventually(lambda: arrived() == LOAD)
        yield clients


# ---------------------------------------------------------------------------------------------------- as in one process


@asynchronous
async def test_32_requests_from_two_processes_say_what_the_library_says(shared: Server, model: Path) -> None:
    asked = [
        (
            [3 + (7 * i + j) % 250 for j in range(1 + i % 9)],
            SamplingParams(max_tokens=6 + i % 7, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=i % 3),
            [None, *ADAPTERS][i % 4],
        )
        for i in range(32)
    ]
    async with connected(shared) as first, connected(shared) as second:
        streams = [collect((first, second)[i % 2].generate(*request)) for i, request in enumerate(asked)]
        answers = await asyncio.gather(*streams)
        await idle(first)
    with LLM(model, adapters=ADAPTERS, **CONFIG) as llm:
        for (prompt, params, adapter), events in zip(asked, answers, strict=True):
            (expected,) = llm.generate([prompt], params, adapter=adapter)[0].outputs
            assert tokens(events) == expected.token_ids
            logprobs = tuple(event.logprobs for event in events if isinstance(event, TokenEvent))
            assert [one.top_ids for one in logprobs] == [one.top_ids for one in expected.logprobs]
            assert isinstance(events[-1], RequestFinished)


@asynchronous
async def test_what_is_refused_is_raised_before_the_first_event(shared: Server) -> None:
    async with connected(shared) as engine:
        for error, prompt, adapter in ((RequestRejected, [], None), (RequestRejected, [2**70], None),
                                       (AdapterNotFound, [5], "nobody")):  # fmt: skip
            with pytest.raises(error):
                await collect(engine.generate(prompt, SamplingParams(), adapter))
        with pytest.raises(RequestRejected, match="64 bits"):
            await collect(engine.generate([5], SamplingParams(top_k=2**64), None))
        assert engine.is_alive


@asynchronous
async def test_leaving_or_cancelling_frees_the_request(shared: Server) -> None:
    async with connected(shared) as engine:
        stream = engine.generate([7, 8], greedy(200), "a1")
        await anext(stream)
        await stream.aclose()
        for turns in range(12):
            task = asyncio.create_task(collect(engine.generate([7, 8], greedy(200), "a1")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        events: list[Event] = []
        async for batch in engine.generate([9], greedy(200), None):
            events += batch
            engine.abort(batch[0].request_id)
        assert isinstance(events[-1], RequestAborted)
        await idle(engine)


@asynchronous
async def test_adapters_come_and_go_for_all_processes_while_others_stream(shared: Server) -> None:
    async with connected(shared) as loader, connected(shared) as user:
        base = asyncio.create_task(collect(user.generate([4, 5, 6], greedy(200), None)))
        uid = await loader.load_adapter("guest", "dummy:r=8,targets=q+v,seed=77")
        assert await loader.load_adapter("twin", "dummy:r=8,targets=q+v,seed=77") == uid
        async with asyncio.timeout(WAIT_S):
            while "twin" not in user.adapters():
                await asyncio.sleep(0)
        stream = user.generate([4, 5, 6], greedy(150), "guest")
        first = await anext(stream)
        await loader.unload_adapter("guest")
        twin = await collect(user.generate([4, 5, 6], greedy(150), "twin"))
        await loader.unload_adapter("twin")
        rest = await collect(stream)
        assert len(tokens(twin)) == 150, "a name was taken away and the other one's adapter with it"
        assert tokens(first + rest) == tokens(twin), "unloading disturbed a request that was running"
        assert loader.adapters() == tuple(ADAPTERS)
        with pytest.raises(AdapterNotFound):
            await loader.unload_adapter("guest")
        assert len(tokens(await base)) == 200
        await idle(user)
        await nothing_is_registered_but_the_shared(user)
    assert list(next(shared.slabs.iterdir()).iterdir()) == [], "a slab kept its name"


@asynchronous
async def test_what_cannot_be_loaded_says_why_as_the_library_does(shared: Server, tmp_path: Path) -> None:
    async with connected(shared) as engine:
        with pytest.raises(AdapterRejected) as rejected:
            await engine.load_adapter("bad", "dummy:r=0,what=1")
        assert len(rejected.value.problems) == 2
        with pytest.raises(AdapterRejected, match="starts with a letter"):
            await engine.load_adapter("../bad", "dummy:r=4")
        with pytest.raises(AdapterNameTaken):
            await engine.load_adapter("a0", "dummy:r=4,seed=99")
        with pytest.raises(PoolTooSmall) as too_small:
            await engine.load_adapter("big", "dummy:r=2048")
        assert too_small.value.needed_pages > too_small.value.total_pages
        assert str(too_small.value).startswith("adapter 'big' needs ")
        with pytest.raises(AdapterRejected):
            await engine.load_adapter("absent", str(tmp_path / "nowhere"))
        assert engine.adapters() == tuple(ADAPTERS)
        await nothing_is_registered_but_the_shared(engine)


@asynchronous
async def test_a_name_that_changed_on_the_way_is_resolved_again_once(shared: Server) -> None:
    async with connected(shared) as engine:
        expected = await collect(engine.generate([9, 8], greedy(8), "a0"))
        names = engine._publisher.names
        names["a0"] = names["gone"] = type(names["a0"])("0" * 64)  # as if told late
        assert tokens(await collect(engine.generate([9, 8], greedy(8), "a0"))) == tokens(expected)
        with pytest.raises(AdapterNotFound, match="gone"):
            await collect(engine.generate([9, 8], greedy(8), "gone"))


@asynchronous
async def test_slabs_beyond_the_budget_are_made_again_and_checked(shared: Server, tmp_path: Path) -> None:
    """1 MiB of host memory holds 3 of these adapters, and the pool 12 of the 16."""
    sources = {f"many{i}": f"dummy:r=32,targets=all,seed={i}" for i in range(16)}
    changing = write_adapter(tmp_path / "changing", seed=1)
    async with connected(shared) as engine:
        await engine.load_adapter("changing", str(changing))
        for name, source in sources.items():
            await engine.load_adapter(name, source)
        said = {}
        for turn in range(2):
            answers = await asyncio.gather(*(collect(engine.generate([5, 6], greedy(6), name)) for name in sources))
            for name, events in zip(sources, answers, strict=True):
                assert isinstance(events[-1], RequestFinished), events[-1]
                assert said.setdefault(name, tokens(events)) == tokens(events), turn
        assert (await engine.stats()).adapter_evictions > 0, "everything had room: this tests nothing"
        write_adapter(changing, seed=2)
        events = await collect(engine.generate([5, 6], greedy(6), "changing"))
        assert isinstance(events[-1], RequestFailed)
        assert "has changed since it was registered" in events[-1].reason
        for name in (*sources, "changing"):
            await engine.unload_adapter(name)
        await idle(engine)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux tells")
def test_the_publisher_leaves_the_cores_to_steps_and_is_not_starved(shared: Server) -> None:
    (publisher,), (engine,) = shared.pids("publisher"), shared.pids("engine")
    behind = os.getpriority(os.PRIO_PROCESS, publisher) - os.getpriority(os.PRIO_PROCESS, engine)
    assert 0 < behind <= 15
    assert os.sched_getscheduler(publisher) == os.SCHED_BATCH
    assert os.sched_getscheduler(engine) == os.SCHED_OTHER


def test_only_the_engine_and_the_publisher_have_torch(shared: Server) -> None:
    def maps_torch(pid: int) -> bool:
        return "/torch/" in Path(f"/proc/{pid}/maps").read_text()

    assert shared.look()["is_alive"]
    assert [maps_torch(*shared.pids(role)) for role in ("engine", "publisher", "api")] == [True, True, False]


# ---------------------------------------------------------------------------------------------------- deaths


def test_each_process_may_be_killed_under_load(start: Callable[..., Server]) -> None:
    server = start()
    with load(server) as clients:
        server.kill("api")
        for client in clients:
            client.lines()  # until the connection has ended
    eventually(lambda: server.look()["kv_pages"] == 0)
    assert server.look()["output_tokens"] < LOAD * LOAD_TOKENS, "the engine went on for readers that had died"
    assert server.look()["adapters"] == [*ADAPTERS]

    with server.ask(do="generate", prompt=[5, 6], max_tokens=240, adapter="a1") as stream:
        assert stream.line()
        server.kill("publisher")
        lines = stream.lines()
        assert lines[-1]["end"] == "RequestFinished", "the death of the publisher disturbed a request"

    (answer,) = server.ask(do="load", name="new", source="dummy:r=8,seed=5").lines()
    assert "error" not in answer, "a load did not wait for the publisher that takes the dead one's place"
    assert server.pids("publisher")
    assert server.look()["adapters"] == [*ADAPTERS, "new"]
    (answer,) = server.ask(do="load", name="a0", source="dummy:r=8,seed=5").lines()
    assert answer["error"] == "AdapterNameTaken"
    assert server.ask(do="generate", prompt=[5], max_tokens=3, adapter="new").lines()[-1]["end"] == "RequestFinished"

    with load(server) as clients:
        server.kill("engine")
        ends = [[line["end"] for line in client.lines() if line["end"]] for client in clients]
    assert all(end in (["RequestFinished"], ["RequestFailed"]) for end in ends)
    assert ["RequestFailed"] in ends, "all had ended before the engine died: this tests nothing"
    eventually(lambda: not server.look()["is_alive"])
    assert server.ask(do="generate", prompt=[5], max_tokens=3).lines()[-1]["error"] == EngineDead.__name__
    assert server.process.poll() is None, "it answers until it is told to stop"

    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 1
    server.assert_nothing_is_left()


def test_a_load_that_a_dying_publisher_never_took_up_is_asked_of_the_next_one(start: Callable[..., Server]) -> None:
    """A process that was killed looks alive until it has closed its sockets."""
    server = start()
    (pid,) = server.pids("publisher")
    os.kill(pid, signal.SIGSTOP)
    with server.ask(do="load", name="new", source="dummy:r=8,seed=5") as load:
        assert server.look()["adapters"] == [*ADAPTERS]  # the load was sent before this was asked
        server.kill("publisher")
        (answer,) = load.lines()
    assert "error" not in answer
    assert server.look()["adapters"] == [*ADAPTERS, "new"]
    assert server.ask(do="generate", prompt=[5], max_tokens=3, adapter="new").lines()[-1]["end"] == "RequestFinished"


def test_killing_the_supervisor_leaves_nothing(start: Callable[..., Server]) -> None:
    server = start()
    with server.ask(do="generate", prompt=[5], max_tokens=240) as client:
        assert client.line()
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        server.assert_nothing_is_left()


def test_sigterm_lets_requests_finish(start: Callable[..., Server]) -> None:
    server = start()
    with server.ask(do="generate", prompt=[5], max_tokens=240, adapter="a0") as client:
        first = client.line()
        assert first is not None
        server.process.send_signal(signal.SIGTERM)
        lines = [first, *client.lines()]
    assert lines[-1]["end"] == "RequestFinished"
    assert sum(len(line["tokens"]) for line in lines) == 240
    assert server.wait() == 0
    server.assert_nothing_is_left()


def test_a_second_signal_ends_everything_at_once(start: Callable[..., Server]) -> None:
    server = start()
    with load(server):
        os.kill(*server.pids("engine"), signal.SIGSTOP)  # the requests will never end by themselves
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    server.assert_nothing_is_left()


def test_a_signal_during_the_start_ends_it(start: Callable[..., Server]) -> None:
    server = start(wait=False)
    eventually(lambda: server.pids("engine") and server.pids("publisher"))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    server.assert_nothing_is_left()


def test_a_signal_while_api_processes_begin_to_answer_is_an_orderly_end(start: Callable[..., Server]) -> None:
    server = start(wait=False, api_workers=2)
    eventually(lambda: server.pids("api"))  # long before they are ready
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    server.assert_nothing_is_left()


def test_after_the_engine_s_death_it_exits_by_itself_if_told_to(start: Callable[..., Server]) -> None:
    server = start(exit_after_s=0.1)
    server.kill("engine")
    assert server.wait() == 1
    server.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"model": "/nowhere/at/all"}, "CheckpointError", "/nowhere/at/all"),
        ({"config": CONFIG | {"memory": "64KiB"}}, "PoolTooSmall", "memory is"),
        ({"adapters": {"good": "dummy:r=4", "bad": "dummy:r=0"}}, "AdapterRejected", "r must be"),
        ({"slab_dir": "/nowhere/at/all"}, "ConfigError", "slab_dir"),
    ],
    ids=["model", "pool", "adapter", "slabs"],
)
def test_what_keeps_it_from_starting_is_said_before_the_port_opens(
    start: Callable[..., Server], settings: dict[str, Any], error: str, words: str
) -> None:
    server = start(**settings)
    assert (server.said["error"], server.said["bound"]) == (error, False)
    assert words in server.said["message"]
    assert server.wait() == 3
    server.assert_nothing_is_left()
