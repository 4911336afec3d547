"""Whose turn it is in a burst: a few in each turn of the event loop, in order, and nobody beyond the queue's places."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from interleaf.server.errors import ApiError
from interleaf.server.state import Queue
from interleaf.server.turns import Turns, require_place
from tests.support.asynchronous import asynchronous

GENERATION = "/v1/completions"
AT_A_TIME = 8


class Application:
    """Notes who was let in, in which turn of the event loop, and who is told that there is no place."""

    def __init__(self, queue: Queue, hold: bool = False) -> None:
        self.queue = queue
        self.hold = hold
        self.turn = 0
        self.began: list[tuple[int, int]] = []
        self.refused: list[int] = []
        self.told: set[tuple[int, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began.append((scope["number"], self.turn))
        if scope["path"] != GENERATION:
            return
        try:
            require_place(Request(scope), self.queue)
        except ApiError as error:
            self.refused.append(scope["number"])
            self.told.add((error.status, error.headers["Retry-After"]))
        else:
            self.queue.num_open += self.hold

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def nothing(*_: object) -> Any:
    raise AssertionError("nothing is read or sent here")


def ask(turns: Turns, number: int, path: str = GENERATION) -> asyncio.Task[None]:
    scope = {"type": "http", "path": path, "number": number, "headers": []}
    return asyncio.create_task(turns(scope, nothing, nothing))


@asynchronous
async def test_a_burst_begins_in_order_a_few_in_each_turn_of_the_loop() -> None:
    app = Application(Queue(1000))
    turns = Turns(app, app.queue)
    counting = asyncio.create_task(app.count_turns())
    await asyncio.gather(*(ask(turns, i) for i in range(100)))
    counting.cancel()
    assert [number for number, _ in app.began] == list(range(100))
    by_turn = [turn for _, turn in app.began]
    assert max(by_turn.count(turn) for turn in by_turn) == AT_A_TIME
    assert app.queue.num_coming == 0


@asynchronous
async def test_whoever_asks_for_the_servers_health_waits_for_nobody() -> None:
    app = Application(Queue(1000))
    turns = Turns(app, app.queue)
    counting = asyncio.create_task(app.count_turns())
    burst = [ask(turns, i) for i in range(100)]
    asked = [ask(turns, 100, "/health"), ask(turns, 101, "/metrics")]
    await asyncio.gather(*burst, *asked)
    counting.cancel()
    began = dict(app.began)
    assert began[100] == began[101] == began[0]
    assert began[99] >= began[0] + 99 // AT_A_TIME


@asynchronous
async def test_those_that_find_no_place_are_told_so_in_turn_and_all_others_are_let_in() -> None:
    app = Application(Queue(30), hold=True)
    app.queue.num_open = 10
    turns = Turns(app, app.queue)
    await asyncio.gather(*(ask(turns, i) for i in range(50)))
    assert app.refused == list(range(20, 50))
    assert app.told == {(429, "1")}
    assert app.queue.num_open == 30
    assert [number for number, _ in app.began] == list(range(50))
    app.queue.num_open = 29
    await ask(turns, 50)
    await ask(turns, 51)
    assert app.refused[30:] == [51]


@asynchronous
async def test_what_is_no_generation_takes_no_place() -> None:
    app = Application(Queue(1), hold=True)
    turns = Turns(app, app.queue)
    await asyncio.gather(*(ask(turns, i, "/v1/models") for i in range(50)), ask(turns, 50))
    assert not app.refused


@asynchronous
async def test_one_that_is_cancelled_gives_back_its_place_and_its_turn() -> None:
    app = Application(Queue(1000))
    turns = Turns(app, app.queue)
    burst = [ask(turns, i) for i in range(3 * AT_A_TIME)]
    await asyncio.sleep(0)
    for waiting in burst[AT_A_TIME : 2 * AT_A_TIME]:
        waiting.cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert [number for number, _ in app.began] == [*range(AT_A_TIME), *range(2 * AT_A_TIME, 3 * AT_A_TIME)]
    assert app.queue.num_coming == 0
    with pytest.raises(asyncio.CancelledError):
        burst[AT_A_TIME].result()
