"""A burst of requests, each for another cold adapter: all are answered or told to come again, and nobody is hurt."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from interleaf.adapters.host_tier import HostEntry
from interleaf.adapters.store import AdapterStore
from interleaf.config import ServerConfig
from interleaf.core import AdapterUid
from interleaf.engine.serving import AsyncEngine
from tests.conftest import REPOSITORY
from tests.e2e.test_metrics import scrape, value
from tests.support.program import Program
from tests.support.served import serving, tiny_engine
from tests.support.tiny_models import make_model, save_model
from tests.support.waiting import WAIT_S

PROMPT = [5, 6, 7]
ADAPTERS = 2_000
PAGE_BYTES = 3 * 2 * 4 * 2 * 16 * 4
IN_HOST_MEMORY = 50
"""Adapters for which there is room in host memory: all others are made again when they are wanted."""


async def ask(port: int, model: str) -> tuple[int, str, list[int]]:
    """Returns: status, Retry-After, token ids."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"return_token_ids": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    header, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, retry = int(header.split()[1]), header.lower().partition(b"\r\nretry-after: ")[2].split(b"\r\n")[0]
    return status, retry.decode(), json.loads(answer)["choices"][0]["token_ids"] if status == 200 else []


def test_each_of_a_burst_for_as_many_cold_adapters_ends_and_those_that_run_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are read only once the queue has been full: how fast requests come does not matter."""
    full = threading.Event()
    fetch = AdapterStore._fetch_image

    def fetch_when_full(store: AdapterStore, uid: AdapterUid, entry: HostEntry) -> None:
        assert full.wait(WAIT_S)
        fetch(store, uid, entry)

    monkeypatch.setattr(AdapterStore, "_fetch_image", fetch_when_full)
    model = save_model(make_model("llama3"), tmp_path / "model")
    names = [f"a{i}" for i in range(ADAPTERS)]
    room = ADAPTERS * 3 // 4

    async def prepare(engine: AsyncEngine) -> None:
        for i, name in enumerate(names):
            await engine.load_adapter(name, f"dummy:r=1,targets=q+v,seed={i}")

    def engine() -> Any:
        return tiny_engine(
            model, memory="1MiB", page_tokens=4, max_model_len=256, max_num_seqs=32, max_batch_tokens=256,
            adapter_host_memory=IN_HOST_MEMORY * PAGE_BYTES,
        )  # fmt: skip

    limits = {"max_waiting": room - 32, "max_connections": 2 * ADAPTERS}
    with serving(engine, prepare, **limits) as (url, _):
        began = time.monotonic()
        told: list[tuple[float, int]] = []  # when the stream that runs already says something, and how many tokens

        def stream() -> None:
            body = {"model": "base", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
            body["return_token_ids"] = True
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        told.append((time.monotonic(), len(json.loads(line[6:])["choices"][0]["token_ids"])))

        async def burst() -> list[tuple[int, str, list[int]]]:
            port = int(url.rpartition(":")[2])

            async def ask_for(name: str) -> tuple[int, str, list[int]]:
                answer = await ask(port, name)
                if answer[0] == 429:
                    full.set()
                return answer

            return await asyncio.gather(*(ask_for(name) for name in names))

        answers: list[tuple[int, str, list[int]]] = []
        running = threading.Thread(target=stream)
        running.start()
        while not told:
            assert running.is_alive()
        asking = threading.Thread(target=lambda: answers.extend(asyncio.run(burst())))
        asking.start()
        while asking.is_alive():  # and whoever looks meanwhile is answered
            assert value(scrape(url), "num_requests_waiting") <= room
            asking.join(0.2)
        took = time.monotonic() - began
        running.join()
        samples = scrape(url)

        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= room - 1, "a place in the queue was left empty"
        assert statuses[429] > 0, "the queue was never full"
        assert {retry for status, retry, _ in answers if status == 429} == {"1"}
        assert all(len(ids) == 2 for status, _, ids in answers if status == 200)
        assert sum(count for _, count in told) == 200, "the stream that ran already has lost tokens"
        times = [moment for moment, _ in told]
        assert max(b - a for a, b in itertools.pairwise(times)) < took / 2, "it stood still meanwhile"
        waited_s = {
            dict(labels)["reason"]: seconds
            for (name, labels), seconds in samples.items()
            if name == "interleaf:request_queue_time_by_reason_seconds_total" and seconds
        }
        assert waited_s, "nobody was told what for"
        assert value(samples, "adapter_failed_loads_total") == 0
        assert value(samples, "num_requests_waiting") == value(samples, "num_requests_running") == 0
        assert value(samples, "pool_pages", owner="kv") == 0
        owners = [value(samples, "pool_pages", owner=owner) for owner in ("free", "adapter")]
        assert sum(owners) == 2**20 // PAGE_BYTES
        assert value(samples, "adapter_loads_total") >= statuses[200]
        assert sum(1 for name, _ in samples if name == "interleaf:adapter_requests_total") <= 101
    print(f"{ADAPTERS} requests: {took:.1f} s, {dict(statuses)}, seconds waited by reason {waited_s}")


# --- ten thousand, over processes -------------------------------------------------------------------------------------

MANY = 10_000
FILES = MANY + 500
"""That a client or a server of so many connections has open."""


async def load(url: str, count: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        indices = iter(range(count))

        async def some() -> None:
            for i in indices:
                body = {"lora_name": f"a{i}", "lora_path": f"dummy:r=1,targets=q+v,seed={i}"}
                answer = await http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(some() for _ in range(8)))


def burst_of(program: Program, count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Ask for so many adapters at once; the server says that it lives whenever it is asked meanwhile.

    Returns: answers by status, and what they said.
    """
    words = [sys.executable, "-m", "tests.support.burst_client", str(program.port), str(count)]
    began, slowest = time.monotonic(), 0.0
    client = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    num_asked = 0
    while client.poll() is None:
        asked = time.monotonic()
        assert httpx.get(program.url + "/health", timeout=300).status_code == 200
        slowest = max(slowest, time.monotonic() - asked)
        num_asked += 1
        time.sleep(0.1)
    assert client.stdout is not None
    with client.stdout:
        told = json.loads(client.stdout.read())
    took = time.monotonic() - began
    print(f"{count} at once: {took:.1f} s, {told}; /health {num_asked} times, {slowest:.1f} s at most")
    return told["outcomes"], told["said"]


def program_of(folder: Path, *words: object) -> Program:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < FILES:
        pytest.skip(f"{FILES} open files are needed, this system allows {limit}")
    model = save_model(make_model("llama3"), folder / "model")
    return Program(
        model, "--served-model-name", "base", "--memory", "1MiB", "--page-tokens", 4, "--max-model-len", 256,
        "--max-num-seqs", 32, "--max-batch-tokens", 256, "--adapter-host-memory", IN_HOST_MEMORY * PAGE_BYTES,
        "--header-timeout", 300, "--allow-runtime-loading", "--allow-dummy-adapters", *words, folder=folder,
    )  # fmt: skip


@pytest.mark.long
def test_ten_thousand_requests_for_ten_thousand_cold_adapters_are_answered_or_told_to_come_again(
    tmp_path: Path,
) -> None:
    with program_of(tmp_path, "--max-connections", FILES, "--max-waiting", MANY // 4) as program:
        asyncio.run(load(program.url, MANY))
        outcomes, said = burst_of(program, MANY)
        assert set(outcomes) <= {"200", "429"}, outcomes
        assert sum(outcomes.values()) == MANY
        assert outcomes["200"] >= MANY // 4, "places in the queue were left empty"
        assert set(said) <= {"2 tokens", "429, retry-after, rate_limit_error"}, said
        samples = scrape(program.url)
        assert value(samples, "adapter_failed_loads_total") == 0
        assert value(samples, "num_requests_waiting") == value(samples, "num_requests_running") == 0
        assert value(samples, "pool_pages", owner="kv") == 0
        owners = [value(samples, "pool_pages", owner=owner) for owner in ("free", "adapter")]
        assert sum(owners) == 2**20 // PAGE_BYTES
        assert value(samples, "adapter_loads_total") >= outcomes["200"]
        waited, parts = (
            sum(number for (name, _), number in samples.items() if name == f"interleaf:adapter_{what}")
            for what in ("queue_time_seconds_sum", "queue_time_by_reason_seconds_total")
        )
        assert waited == pytest.approx(parts, rel=1e-6)
        assert not any("Traceback" in line for line in program.log)


@pytest.mark.long
def test_ten_thousand_connections_at_once_are_served_up_to_the_limit_and_no_other_is_reset(tmp_path: Path) -> None:
    with program_of(tmp_path) as program:
        served = ServerConfig(model="any").max_connections
        outcomes, said = burst_of(program, MANY)
        # Nobody has loaded an adapter: 404 is an answer. A check of the server's health takes a connection, too.
        assert set(outcomes) <= {"404", "429", "503"}, outcomes
        assert sum(outcomes.values()) == MANY
        assert MANY - outcomes["503"] >= served - 1
        assert outcomes["503"] > 0, "the limit was never reached: this does not test what is beyond it"
        assert set(said) <= {
            "404, no retry-after, invalid_request_error",
            "429, retry-after, rate_limit_error",
            "503, retry-after, server_error",
        }
        assert not any("Traceback" in line for line in program.log)
