"""Adapters that do not come as they should: the program, its processes, real sockets.

One server for all tests, small on purpose: its pool holds a few of the adapters, its host memory two. After every
fault it must have lost no page, and serve the adapter that failed once what was wrong is right again.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from interleaf import LLM, SamplingParams
from tests.e2e.test_metrics import Samples, scrape, value
from tests.e2e.test_processes import command, descendants, eventually
from tests.support.burst_client import request
from tests.support.peft_folders import NUM_LAYERS, WEIGHTS, WIDTHS, Draft, make_tensors
from tests.support.program import Program
from tests.support.served import error_of
from tests.support.tiny_models import make_model, save_model

ADAPTERS, ADAPTER_PAGES, POOL_PAGES, PAGE_BYTES = 30, 4, 48, 3 * 2 * 4 * 2 * 16 * 4
LOAD_TIMEOUT_S = 6.0
"""Longer than it takes until a request that waits becomes a line of the log."""
SETTINGS = {"page_tokens": 4, "max_model_len": 64, "max_num_seqs": 8, "max_batch_tokens": 64}
ON_DISK = "adapter is read from disk"


class Server:
    """The program, what it serves, and one connection pool to it."""

    def __init__(self, program: Program, root: Path, model: Path) -> None:
        self.program = program
        self.root = root
        self.model = model
        self.http = httpx.Client(base_url=program.url, timeout=60)

    def ask(self, model: str, max_tokens: int = 4) -> httpx.Response:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body | {"return_token_ids": True})

    def ids(self, model: str) -> list[int]:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    def look(self) -> Samples:
        return scrape(self.program.url)

    def publisher(self) -> int:
        pids = [pid for pid in descendants(self.program.process.pid) if " publisher " in command(pid)]
        return pids[0] if pids else 0

    def weights(self, name: str) -> Path:
        return self.root / name / WEIGHTS

    def make_cold(self, name: str) -> None:
        """Use all others: one by one they take its place in the pool and in host memory."""
        for other in names():
            if other != name:
                assert self.ask(other, 1).status_code == 200
        assert resident(self.look(), name) == 0

    def wait_for(self, reason: str, count: int = 1) -> None:
        eventually(lambda: value(self.look(), "num_requests_waiting_by_reason", reason=reason) == count)

    def assert_balanced(self) -> None:
        """Nobody runs or waits, and every page is free or an idle adapter's."""
        eventually(
            lambda: value(self.look(), "num_requests_running") == value(self.look(), "num_requests_waiting") == 0
        )
        eventually(lambda: value(self.look(), "pool_pages", owner="kv") == 0)
        samples = self.look()
        adapter_pages = value(samples, "pool_pages", owner="adapter")
        assert adapter_pages == ADAPTER_PAGES * value(samples, "adapters_resident")
        assert value(samples, "pool_pages", owner="free") + adapter_pages == POOL_PAGES
        assert self.http.get("/health").status_code == 200


def names() -> list[str]:
    return [f"a{i}" for i in range(ADAPTERS)]


def waited_s(samples: Samples, name: str, reason: str) -> float:
    labels = frozenset({("adapter", name), ("reason", reason)})
    return samples.get(("interleaf:adapter_queue_time_by_reason_seconds_total", labels), 0)


def resident(samples: Samples, name: str) -> float:
    return samples.get(("interleaf:adapter_resident_pages", frozenset({("adapter", name)})), 0)


def draft(seed: int) -> Draft:
    return Draft(tensors=make_tensors({(l, m): 4 for l in range(NUM_LAYERS) for m in ("q_proj", "v_proj")}, seed))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    model = save_model(make_model("llama3"), folder / "model")
    for i, name in enumerate(names()):
        draft(i).write(folder / "root" / name)
    flags = {f"--{name.replace('_', '-')}": setting for name, setting in SETTINGS.items()}
    flags |= {
        "--memory": POOL_PAGES * PAGE_BYTES,
        "--adapter-host-memory": 2 * ADAPTER_PAGES * PAGE_BYTES,
        "--eviction": "lru",
        "--load-timeout": LOAD_TIMEOUT_S,
        "--adapters-dir": folder / "root",
        "--served-model-name": "base",
    }
    words = [word for flag in flags.items() for word in flag]
    with Program(model, *words, "--allow-runtime-loading", folder=folder) as program:
        server = Server(program, folder / "root", model)
        with server.http:
            yield server


@pytest.fixture(autouse=True)
def balanced(server: Server) -> Iterator[None]:
    yield
    server.assert_balanced()


def in_background(*asked: Callable[[], httpx.Response]) -> list[Future[httpx.Response]]:
    pool = ThreadPoolExecutor(len(asked))
    try:
        return [pool.submit(ask) for ask in asked]
    finally:
        pool.shutdown(wait=False)


def test_host_memory_for_two_adapters_serves_thirty_at_once_and_each_as_it_should_be(server: Server) -> None:
    order = [name for name in names() for _ in range(2)]
    answers = [each.result() for each in in_background(*(lambda n=name: server.ask(n) for name in order))]  # type: ignore[misc]
    assert [answer.status_code for answer in answers] == [200] * len(order)
    said = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    with LLM(server.model, adapters={n: server.root / n for n in names()}, memory="4MiB", **SETTINGS) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        outputs = llm.generate([[5, 6, 7]] * len(order), params, adapter=order)
    assert said == [list(output.outputs[0].token_ids) for output in outputs]
    assert len({tuple(ids) for ids in said}) > ADAPTERS / 2, "the adapters make no difference: this tests nothing"
    assert value(server.look(), "adapter_evictions_total") > 0


def test_a_load_that_hangs_fails_its_requests_in_time_and_delays_nobody_else(server: Server) -> None:
    before = server.ids("a3")
    for _ in range(5):
        server.make_cold("a3")
        publisher = server.publisher()
        os.kill(publisher, signal.SIGSTOP)
        try:
            seen = server.look()
            num_lines = len(server.program.log)
            hanging, left, was_in_time = _ask_and_look_at_others(server, seen)
            answers = [each.result() for each in hanging]
        finally:
            os.kill(publisher, signal.SIGCONT)
        for answer in answers:
            assert answer.status_code == 500
            error = error_of(answer)
            assert error["code"] == "request_failed"
            assert f"was not read into host memory within {LOAD_TIMEOUT_S:g} s" in str(error["message"])
        eventually(lambda: value(server.look(), "num_requests_waiting") == 0)
        assert server.ids("a3") == before
        if was_in_time:
            break
    else:
        pytest.fail("the machine is too slow, five times, to tell whether others waited")

    now = server.look()
    asked = value(now, "adapter_requests_total", adapter="a3") - value(seen, "adapter_requests_total", adapter="a3")
    assert asked == 3 + left + 1, "the one that has left is counted, and the one that was answered in the end"
    waited = waited_s(now, "a3", ON_DISK) - waited_s(seen, "a3", ON_DISK)
    assert waited >= 3 * (LOAD_TIMEOUT_S - 0.5), "beside reading the clock between two steps"
    ids = [answer.headers["x-request-id"] for answer in answers]
    eventually(lambda: sum(any(id_ in line for id_ in ids) for line in server.program.log[num_lines:]) == 2 * 3)
    lines = [line for line in server.program.log[num_lines:] if any(id_ in line for id_ in ids)]
    assert sum("request waits" in line and f"reason={ON_DISK}" in line for line in lines) == 3, "one for each request"
    assert sum("status=500" in line for line in lines) == 3
    assert all("adapter=a3" in line and f"waited_for={ON_DISK}:" in line for line in lines)


def _ask_and_look_at_others(server: Server, seen: Samples) -> tuple[list[Future[httpx.Response]], int, bool]:
    """Three requests for an adapter that does not come, and one whose client leaves.

    Returns: the three; how many have left; whether all was seen before the three were given up.
    """
    warm = next(name for name in reversed(names()) if resident(seen, name))
    hanging = in_background(*[lambda: server.ask("a3")] * 3)
    # The engine may give them up before they are seen here.
    if not _they_wait(server, hanging, 3):
        return hanging, 0, False
    with socket.create_connection(("127.0.0.1", server.program.port)) as leaves:
        leaves.sendall(request("a3"))
        has_come = _they_wait(server, hanging, 4)
    if not has_come or not _they_wait(server, hanging, 3):
        return hanging, 1, False
    for _ in range(5):
        assert server.ask("base").status_code == 200
        assert server.ask(warm).status_code == 200
    return hanging, 1, not any(each.done() for each in hanging)


def _they_wait(server: Server, hanging: list[Future[httpx.Response]], count: int) -> bool:
    def seen() -> bool:
        return value(server.look(), "num_requests_waiting_by_reason", reason=ON_DISK) == count

    eventually(lambda: seen() or any(each.done() for each in hanging))
    return not any(each.done() for each in hanging)


def test_while_a_step_hangs_health_and_the_last_snapshot_are_served(server: Server) -> None:
    before = server.look()
    engine = next(pid for pid in descendants(server.program.process.pid) if " engine " in command(pid))
    os.kill(engine, signal.SIGSTOP)
    try:
        first, second = server.look(), server.look()
        assert server.http.get("/health").status_code == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    assert value(second, "engine_stats_age_seconds") > value(first, "engine_stats_age_seconds") > 1
    assert value(second, "adapters_resident") == value(before, "adapters_resident")
    eventually(lambda: value(server.look(), "engine_stats_age_seconds") < 1)


def test_a_load_whose_reader_dies_midway_is_begun_again_or_fails_in_time(server: Server) -> None:
    before = server.ids("a5")
    server.make_cold("a5")
    publisher = server.publisher()
    os.kill(publisher, signal.SIGSTOP)
    (waiting,) = in_background(lambda: server.ask("a5"))
    server.wait_for(ON_DISK)
    os.kill(publisher, signal.SIGKILL)
    assert server.ask("base").status_code == 200
    answer = waiting.result()
    if answer.status_code != 200:  # the machine is too busy to start another one in time
        assert "was not read into host memory within" in str(error_of(answer)["message"])
    eventually(lambda: server.publisher() not in (0, publisher))
    eventually(lambda: server.ask("a5").status_code == 200)
    assert server.ids("a5") == before


@pytest.mark.parametrize("fault", ["cut off", "changed", "gone"])
def test_bytes_that_are_not_what_was_registered_fail_the_adapters_requests_and_no_others(
    server: Server, fault: str
) -> None:
    before = server.ids("a7")
    server.make_cold("a7")
    sound = server.weights("a7").read_bytes()
    match fault:
        case "cut off":
            server.weights("a7").write_bytes(sound[: len(sound) // 2])
        case "changed":
            draft(99).write(server.root / "a7")
        case "gone":
            server.weights("a7").unlink()
    others = in_background(*(lambda n=name: server.ask(n) for name in ("base", "a8", "a9")))  # type: ignore[misc]
    for answer in (each.result() for each in in_background(*[lambda: server.ask("a7")] * 3)):
        assert answer.status_code == 500
        error = error_of(answer)
        assert error["code"] == "request_failed"
        assert ("has changed since it was registered" in str(error["message"])) == (fault == "changed")
        assert "a7" in str(error["message"]), "it does not say what to look at"
    assert [each.result().status_code for each in others] == [200] * 3
    server.weights("a7").write_bytes(sound)
    assert server.ids("a7") == before


def test_an_adapter_larger_than_the_pool_is_refused_with_the_arithmetic(server: Server) -> None:
    rank = 64
    big = make_tensors({(l, m): rank for l in range(NUM_LAYERS) for m in WIDTHS})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(WIDTHS), "task_type": "CAUSAL_LM"}
    Draft(config=config, tensors=big).write(server.root / "big")
    body = {"lora_name": "big", "lora_path": "big"}
    answer = server.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    pages = -(-rank * sum(sum(width) for width in WIDTHS.values()) // (2 * 4 * 2 * 16))
    assert pages > POOL_PAGES
    assert f"{pages} for itself" in str(error_of(answer)["message"])
    assert server.ask("big").status_code == 404
    assert server.ids("a0") == server.ids("a0")
