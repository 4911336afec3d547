"""64 streams over 8 adapters, a third of them killed on the way: the program, its processes, real sockets.

What the pool holds is compared with what those who are left need, worked out here from the model's shape and from the
tokens that each client has seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from interleaf import LLM, SamplingParams
from tests.support.asynchronous import asynchronous
from tests.support.program import Program
from tests.support.tiny_models import SHAPE, VOCAB, make_model, save_model
from tests.support.tiny_text import save_tokenizer
from tests.support.waiting import WAIT_S

STREAMS, KILLED, ADAPTERS = 64, 19, 8
PAGE_TOKENS, RANK = 16, 4
SURVIVORS_TOKENS, KILLED_TOKENS = 160, 1200
AHEAD_TOKENS = 4
"""Of a sequence: computed, or given a page, before its client has the token."""

WIDTHS = {"q": (64, 128), "k": (64, 64), "v": (64, 64), "o": (128, 64), "gate": (64, 128), "up": (64, 128)}
WIDTHS |= {"down": (128, 64)}
LANE_ELEMS = 2 * PAGE_TOKENS * 2 * 32
"""Keys and values of 2 heads of 32: what a page has for one layer."""

ADAPTER_PAGES = ADAPTERS * -(-RANK * sum(map(sum, WIDTHS.values())) // LANE_ELEMS)
SOURCES = {f"adapter-{i}": f"dummy:r={RANK},targets=all,seed={i}" for i in range(ADAPTERS)}


@dataclass(slots=True)
class Client:
    """One stream, on a connection of its own.

    Attributes:
        tokens: that have come.
    """

    adapter: str
    prompt: list[int]
    max_tokens: int
    tokens: int = 0
    text: str = ""
    has_ended: bool = False
    error: str = ""
    _writer: asyncio.StreamWriter | None = None
    _reading: asyncio.Task[None] | None = None
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        body: dict[str, Any] = {"model": self.adapter, "prompt": self.prompt, "max_tokens": self.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        status = await reader.readline()
        if b" 200 " not in status:
            self.error = (status + await reader.read()).decode()
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                self.has_ended = True
            elif line.startswith(b"data: "):
                (choice,) = json.loads(line[6:])["choices"]
                self.tokens += len(choice["token_ids"])
                self.text += choice["text"]
            self.grown.set()

    async def until(self, tokens: int) -> None:
        while self.tokens < tokens and not self.has_ended:
            self.grown.clear()
            await self.grown.wait()

    async def end(self) -> None:
        assert self._writer is not None
        assert self._reading is not None
        await self._reading
        self._writer.close()
        await self._writer.wait_closed()

    async def kill(self, *, rudely: bool) -> None:
        """Leave in the middle, with a reset or by closing."""
        assert self._writer is not None
        assert self._reading is not None
        if rudely:
            self._writer.transport.abort()
        else:
            self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def least_pages(self) -> int:
        return -(-(len(self.prompt) + self.tokens - 1) // PAGE_TOKENS) if self.tokens and not self.has_ended else 0

    @property
    def most_pages(self) -> int:
        return -(-(len(self.prompt) + self.tokens + AHEAD_TOKENS) // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Seen:
    """The engine at one moment, by its own account."""

    sequences: int
    kv_pages: int
    adapter_pages: int


async def look(http: httpx.AsyncClient) -> Seen:
    page = (await http.get("/metrics")).text
    samples = {
        (sample.name.removeprefix("interleaf:"), sample.labels.get("owner", "")): int(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "num_requests" in sample.name or sample.name == "interleaf:pool_pages"
    }
    sequences = samples["num_requests_running", ""] + samples["num_requests_waiting", ""]
    return Seen(sequences, samples["pool_pages", "kv"], samples["pool_pages", "adapter"])


async def balance(http: httpx.AsyncClient, living: list[Client], least_adapter_pages: int) -> float:
    """Wait until the engine holds what the living need, and nothing more. Returns: seconds.

    The time decides nothing: it is the machine's. That none of the survivors has ended meanwhile says as much, for
    those who were killed had asked for far more tokens than they.
    """
    began = time.monotonic()
    while True:
        least_living, least = sum(not c.has_ended for c in living), sum(c.least_pages for c in living)
        seen = await look(http)
        open_now = [client for client in living if not client.has_ended]
        most = sum(client.most_pages for client in open_now)
        # Whoever ended while the engine was asked may be in its answer or not.
        if (
            len(open_now) <= seen.sequences <= least_living
            and (len(open_now) < least_living or least <= seen.kv_pages <= most)
            and least_adapter_pages <= seen.adapter_pages <= ADAPTER_PAGES
        ):
            return time.monotonic() - began
        elapsed = time.monotonic() - began
        assert elapsed < WAIT_S, f"{seen}, wanted {len(open_now)} sequences and {least} to {most} pages of KV"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("qwen3")
    model.config.max_position_embeddings = 2048
    folder = save_model(model, tmp_path_factory.mktemp("tiny") / "model")
    save_tokenizer(folder)
    return folder


def clients() -> list[Client]:
    """More than 17 pages of prompt each, so that a page that is not given back is not lost in the rest."""
    numbers = random.Random(3)
    return [
        Client(
            f"adapter-{i % ADAPTERS}",
            [numbers.randrange(3, VOCAB) for _ in range(numbers.randrange(280, 420))],
            KILLED_TOKENS if i < KILLED else SURVIVORS_TOKENS,
        )
        for i in range(STREAMS)
    ]


def test_the_shape_is_what_the_accounts_are_made_with() -> None:
    assert (SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"]) == (64, 128, 2)


@asynchronous
async def test_whoever_is_killed_gives_all_back_while_the_others_run_and_nobody_else_notices(
    folder: Path, tmp_path: Path
) -> None:
    everybody = clients()
    victims, survivors = everybody[:KILLED], everybody[KILLED:]
    order = random.Random(5)
    settings = {"memory": "256MiB", "page-tokens": PAGE_TOKENS, "max-num-seqs": STREAMS, "max-batch-tokens": 512}
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    adapters = [word for name, source in SOURCES.items() for word in ("--adapter", f"{name}={source}")]
    took = []
    with Program(folder, *flags, *adapters, folder=tmp_path) as program:
        async with httpx.AsyncClient(base_url=program.url, timeout=WAIT_S) as http:
            await asyncio.gather(*(client.start(program.port) for client in order.sample(everybody, STREAMS)))
            living = list(everybody)
            for number, victim in enumerate(victims):
                # The first while prompts are computed, the others after one token, or some more each time.
                await victim.until(0 if number < 4 else 1 + 2 * (number - 4))
                await victim.kill(rudely=number % 2 == 0)
                living.remove(victim)
                took.append(await balance(http, living, 0))
            assert not any(client.has_ended for client in survivors), "all had ended before: this tests nothing"
            await balance(http, living, ADAPTER_PAGES)
            await asyncio.gather(*(client.end() for client in survivors))
            assert [client.error for client in everybody] == [""] * STREAMS
            await balance(http, [], ADAPTER_PAGES)
            seen = await look(http)
            assert (seen.sequences, seen.kv_pages, seen.adapter_pages) == (0, 0, ADAPTER_PAGES)
    engine = {name.replace("-", "_"): value for name, value in settings.items()}
    with LLM(folder, adapters=SOURCES, **engine) as llm:
        params = SamplingParams(max_tokens=SURVIVORS_TOKENS, temperature=0, ignore_eos=True)
        outputs = llm.generate([c.prompt for c in survivors], params, adapter=[c.adapter for c in survivors])
    for client, output in zip(survivors, outputs, strict=True):
        assert client.tokens == SURVIVORS_TOKENS
        assert client.text == output.outputs[0].text, client.adapter
    print(f"balance after a kill: {max(took):.3f} s at most, {sum(took) / len(took):.3f} s on average")
