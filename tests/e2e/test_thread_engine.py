"""An engine on a thread answers many readers at once: text, cancellation, adapters, failure. No request is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interleaf import LLM, SamplingParams
from interleaf.config import EngineConfig
from interleaf.core import Event, FinishReason, RequestAborted, RequestFailed, RequestFinished, TokenEvent
from interleaf.engine.build import EngineParts, build_engine
from interleaf.engine.client import InProcessClient
from interleaf.engine.serving import EngineInfo, ThreadEngine
from interleaf.errors import AdapterNotFound, AdapterRejected, EngineDead, RequestRejected
from interleaf.memory.allocator import OwnerKind
from tests.support.asynchronous import asynchronous
from tests.support.tiny_models import make_model, save_model

ADAPTERS = {f"a{i}": f"dummy:r={4 + 4 * i},targets=all,seed={i}" for i in range(3)}
SETTINGS: dict[str, Any] = {"memory": "4MiB", "page_tokens": 4, "max_num_seqs": 16, "max_batch_tokens": 64, "seed": 0}
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def running(model: Path, **settings: Any) -> AsyncIterator[tuple[ThreadEngine, EngineParts]]:
    parts = build_engine(str(model), EngineConfig(**SETTINGS | settings))
    client = InProcessClient(parts)
    for name, source in ADAPTERS.items():
        client.add_adapter(name, source)
    engine = ThreadEngine(client, EngineInfo.of(parts))
    try:
        yield engine, parts
    finally:
        await engine.close()


async def collect(stream: AsyncIterator[list[Event]]) -> list[Event]:
    return [event async for events in stream for event in events]


def tokens(events: list[Event], index: int = 0) -> tuple[int, ...]:
    return tuple(e.token_id for e in events if isinstance(e, TokenEvent) and e.index == index)


def terminals(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, TokenEvent)]


async def idle(engine: ThreadEngine) -> None:
    """Return when the engine has nothing to do."""
    async with asyncio.timeout(WAIT_S):
        while True:
            stats = await engine.stats()
            if stats.running_sequences == stats.waiting_sequences == stats.pool.kv_pages == 0:
                return


def requests() -> Iterator[tuple[list[int], SamplingParams, str | None]]:
    for i in range(32):
        params = SamplingParams(max_tokens=6 + i % 7, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        yield [3 + (7 * i + j) % 250 for j in range(1 + i % 9)], params, [None, *ADAPTERS][i % 4]


@asynchronous
async def test_32_requests_at_once_say_what_the_library_says_one_at_a_time(model: Path) -> None:
    asked = list(requests())
    async with running(model) as (engine, _):
        streams = [collect(engine.generate(*request)) for request in asked]
        answers = await asyncio.wait_for(asyncio.gather(*streams), WAIT_S)
        await idle(engine)
    with LLM(model, adapters=ADAPTERS, **SETTINGS) as llm:
        for (prompt, params, adapter), events in zip(asked, answers, strict=True):
            assert tokens(events) == llm.generate([prompt], params, adapter=adapter)[0].outputs[0].token_ids
            assert terminals(events) == [RequestFinished(events[-1].request_id)]


@asynchronous
async def test_what_is_refused_is_raised_before_the_first_event(model: Path) -> None:
    async with running(model) as (engine, _):
        for error, prompt, adapter in ((RequestRejected, [], None), (AdapterNotFound, [5], "nobody")):
            with pytest.raises(error):
                await collect(engine.generate(prompt, SamplingParams(), adapter))
        with pytest.raises(RequestRejected, match="max_model_len"):
            await collect(engine.generate([5], SamplingParams(max_tokens=engine.info.max_model_len), None))


@asynchronous
async def test_a_reader_that_leaves_ends_its_request_and_no_other(model: Path) -> None:
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    async with running(model) as (engine, _):
        other = asyncio.create_task(collect(engine.generate([7, 8], long, "a1")))
        stream = engine.generate([7, 8], long, "a1")
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(WAIT_S):
            while (await engine.stats()).running_sequences > 1:
                pass
        assert len(tokens(await other)) == 200
        await idle(engine)


@asynchronous
async def test_cancelling_at_any_moment_leaks_no_request(model: Path) -> None:
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    async with running(model) as (engine, parts):
        for yields in range(40):
            task = asyncio.create_task(collect(engine.generate([7] * 20, long, "a2")))
            for _ in range(yields):  # one turn of the loop each: before, during and after the submit
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await idle(engine)
        await engine.unload_adapter("a2")
        async with asyncio.timeout(WAIT_S):  # for the last abort's event: it alone releases the adapter
            while len(parts.store) > 2:
                await engine.stats()
        assert parts.allocator.num_used_pages(OwnerKind.KV) == 0
        assert len(parts.residency.resident()) <= 2
        assert len(parts.store) == 2


def test_a_request_that_ends_before_anything_else_happens_is_told_of_and_lets_go(model: Path) -> None:
    """Nothing is open any more and no step in flight, but somebody is still to be told."""
    client = InProcessClient(build_engine(str(model), EngineConfig(**SETTINGS)))
    try:
        client.add_adapter("a0", ADAPTERS["a0"])
        request_id = client.submit([7] * 20, SamplingParams(max_tokens=9), "a0")
        client.abort(request_id)
        client.remove_adapter("a0")
        assert client.has_work
        (event,) = client.poll()
        assert isinstance(event, RequestAborted)
        assert event.request_id == request_id
        assert event.waits is not None, "it has waited till then"
        assert not client.has_work
        assert client.stats().registered_adapters == 0
        assert len(client._parts.store) == 0
    finally:
        client.close()


@asynchronous
async def test_a_request_that_is_cancelled_while_its_submit_runs_is_aborted(model: Path) -> None:
    """The narrow case by itself: the engine's thread is inside `submit` when the reader goes."""
    async with running(model) as (engine, parts):
        client = engine._client
        inside, go_on = asyncio.Event(), threading.Event()
        loop, submit = asyncio.get_running_loop(), client.submit

        def slow_submit(*args: Any) -> str:
            loop.call_soon_threadsafe(inside.set)
            assert go_on.wait(WAIT_S)
            return submit(*args)

        client.submit = slow_submit  # type: ignore[method-assign]
        task = asyncio.create_task(collect(engine.generate([7], SamplingParams(max_tokens=250), None)))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await idle(engine)
        assert parts.scheduler.num_running == 0


@asynchronous
async def test_one_sequence_of_several_can_be_ended(model: Path) -> None:
    async with running(model) as (engine, _):
        params = SamplingParams(n=3, max_tokens=150, seed=3, ignore_eos=True)
        events: list[Event] = []
        async for batch in engine.generate([9, 10], params, "a0"):
            if not events:
                engine.abort(batch[0].request_id, 1)
            events += batch
        ends = {e.index: e.finish_reason for e in events if isinstance(e, TokenEvent) and e.finish_reason}
        assert len(tokens(events, 1)) < 150
        assert (len(tokens(events, 0)), len(tokens(events, 2))) == (150, 150)
        assert ends.get(1) in (None, FinishReason.ABORT)
        assert terminals(events) == [RequestFinished(events[-1].request_id)]


@asynchronous
async def test_an_aborted_request_says_so(model: Path) -> None:
    async with running(model) as (engine, _):
        events: list[Event] = []
        async for batch in engine.generate([9], SamplingParams(max_tokens=200, ignore_eos=True), None):
            events += batch
            engine.abort(batch[0].request_id)
        assert terminals(events) == [RequestAborted(events[-1].request_id)]


@asynchronous
async def test_adapters_come_and_go_while_others_stream(model: Path) -> None:
    long = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    async with running(model) as (engine, _):
        base = [asyncio.create_task(collect(engine.generate([4, 5, 6], long, adapter))) for adapter in (None, "a0")]
        for i in range(4):
            await engine.load_adapter("guest", f"dummy:r=8,targets=q+v,seed={100 + i}")
            assert "guest" in engine.adapters()
            stream = engine.generate([4, 5, 6], long, "guest")
            first = await anext(stream)
            await engine.unload_adapter("guest")
            assert "guest" not in engine.adapters()
            rest = await collect(stream)
            assert len(tokens(first + rest)) == 120, "unloading ended a request that was running"
            with pytest.raises(AdapterNotFound):
                await collect(engine.generate([4], long, "guest"))
        with pytest.raises(AdapterRejected):
            await engine.load_adapter("bad", "dummy:r=0")
        answers = [tokens(await task) for task in base]
    with LLM(model, adapters=ADAPTERS, **SETTINGS) as llm:
        expected = [llm.generate([[4, 5, 6]], long, adapter=name)[0].outputs[0].token_ids for name in (None, "a0")]
    assert answers == expected


@pytest.mark.parametrize("overlap", [True, False])
@asynchronous
async def test_a_failed_step_ends_every_request_once(model: Path, overlap: bool) -> None:
    async with running(model, overlap=overlap) as (engine, parts):
        forward = parts.runner._model.forward
        calls = 0

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 6:
                raise RuntimeError("the device has gone")
            return forward(*args)

        parts.runner._model.forward = failing  # type: ignore[method-assign]
        asked = [([5, 6], SamplingParams(max_tokens=200, ignore_eos=True), name) for name in [None, *ADAPTERS] * 6]
        tasks = [asyncio.create_task(collect(engine.generate(*request))) for request in asked]
        for answer in await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S):
            (last,) = terminals(answer)
            assert isinstance(last, RequestFailed)
            assert "the device has gone" in last.reason
        assert not engine.is_alive
        with pytest.raises(EngineDead):
            await collect(engine.generate([5], SamplingParams(), None))


@asynchronous
async def test_closing_fails_what_runs_and_refuses_what_comes(model: Path) -> None:
    async with running(model) as (engine, _):
        tasks = [
            asyncio.create_task(collect(engine.generate([5], SamplingParams(max_tokens=250, ignore_eos=True), None)))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.stats())
        await engine.close()
        for answer in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S):
            if not isinstance(answer, EngineDead):
                assert isinstance(answer, list)
                assert isinstance(answer[-1], RequestFailed)
        await asyncio.wait([late])
        assert late.exception() is None or isinstance(late.exception(), EngineDead)
        assert not engine.is_alive
        with pytest.raises(EngineDead):
            await engine.stats()
