"""Requests in the shapes that other clients send, recorded in tests/data/recorded: all are served, or refused by name.

A record is a request (path, headers, body or raw body) and what must come back: `text` of every choice and whether
`usage` is given; or `status` and `param` of a refusal; or the whole `answer`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from interleaf.config import ServerConfig
from interleaf.engine.tokenizer import Tokenizer, load_tokenizer
from interleaf.server.app import create_app
from tests.support.null_engine import NullEngine
from tests.support.tiny_text import save_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recorded"
RECORDS = [
    (file.stem, record) for file in sorted(FOLDER.glob("*.json")) for record in json.loads(file.read_text("utf-8"))
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer is not None
    return tokenizer


def send(tokenizer: Tokenizer, record: dict[str, Any]) -> httpx.Response:
    """The answer of a server whose base is "tiny", with an adapter "red"; everything says that the sea is wide."""

    async def send() -> httpx.Response:
        answer = tokenizer.encode("The sea is wide.")
        engine = NullEngine(lambda prompt, index: answer, max_model_len=256, adapters=("red",))
        app = create_app(engine, tokenizer, ServerConfig(model="tiny"))
        content = record["raw"] if "raw" in record else json.dumps(record["body"])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(record["path"], content=content.encode(), headers=record["headers"])

    return asyncio.run(send())


def test_every_client_of_the_list_is_recorded() -> None:
    assert {client for client, _ in RECORDS} == {"curl", "langchain", "litellm", "vllm"}


@pytest.mark.parametrize(
    ("client", "record"), RECORDS, ids=lambda value: value if isinstance(value, str) else value["what"]
)
def test_a_recorded_request_is_answered(tokenizer: Tokenizer, client: str, record: dict[str, Any]) -> None:
    response = send(tokenizer, record)
    if "status" in record:
        assert response.status_code == record["status"], response.text
        assert response.json()["error"]["param"] == record["param"]
        return
    assert response.status_code == 200, response.text
    if "answer" in record:
        assert response.json() == record["answer"]
        return
    body = record.get("body") or json.loads(record["raw"])
    texts = [""] * len(record["text"])
    usage = None
    for part in chunks_of(response) if body.get("stream") else [response.json()]:
        assert part["model"] == body["model"]
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            texts[choice["index"]] += said.get("content") or said.get("text") or ""
    assert texts == record["text"]
    assert (usage is not None) is record["usage"]


def chunks_of(response: httpx.Response) -> list[Any]:
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    return [json.loads(event) for event in events[:-2]]
