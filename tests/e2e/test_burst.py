"""A burst of requests, each for another cold adapter: all are answered or told to come again, and nobody is hurt."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from interleaf.engine.serving import AsyncEngine
from tests.e2e.test_metrics import scrape, value
from tests.support.served import serving, tiny_engine
from tests.support.tiny_models import make_model, save_model

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


def test_each_of_a_burst_for_as_many_cold_adapters_ends_and_those_that_run_go_on(tmp_path: Path) -> None:
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
            return await asyncio.gather(*(ask(port, name) for name in names))

        answers: list[tuple[int, str, list[int]]] = []
        running = threading.Thread(target=stream)
        running.start()
        while not told:
            assert running.is_alive()
        asking = threading.Thread(target=lambda: answers.extend(asyncio.run(burst())))
        asking.start()
        reasons: Counter[str] = Counter()
        while asking.is_alive():
            samples = scrape(url)
            for (name, labels), number in samples.items():
                if name == "interleaf:num_requests_waiting_by_reason" and number:
                    reasons[dict(labels)["reason"]] += 1
            asking.join(0.2)
        took = time.monotonic() - began
        running.join()
        samples = scrape(url)

        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= room - 1, "a place in the queue was left empty"
        assert statuses[429] > 0, "the queue was never full: this does not test what is beyond it"
        assert {retry for status, retry, _ in answers if status == 429} == {"1"}
        assert all(len(ids) == 2 for status, _, ids in answers if status == 200)
        assert sum(count for _, count in told) == 200, "the stream that ran already has lost tokens"
        times = [moment for moment, _ in told]
        assert max(b - a for a, b in itertools.pairwise(times)) < took / 2, "it stood still meanwhile"
        assert reasons, "nobody was seen to wait"
        assert value(samples, "adapter_failed_loads_total") == 0
        assert value(samples, "num_requests_waiting") == value(samples, "num_requests_running") == 0
        assert value(samples, "pool_pages", owner="kv") == 0
        owners = [value(samples, "pool_pages", owner=owner) for owner in ("free", "adapter")]
        assert sum(owners) == 2**20 // PAGE_BYTES
        assert value(samples, "adapter_loads_total") >= statuses[200]
        assert sum(1 for name, _ in samples if name == "interleaf:adapter_requests_total") <= 101
    print(f"{ADAPTERS} requests: {took:.1f} s, {dict(statuses)}, reasons seen {dict(reasons)}")
