"""Cached prefixes over HTTP: who shares them with whom, and what the answers say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_metrics import scrape, value
from tests.support.served import FakeEngine, error_of, serving, tiny_engine
from tests.support.tiny_models import make_model, save_model
from tests.support.waiting import WAIT_S

PAGE = 4
PROMPT = [3 + i % 50 for i in range(5 * PAGE + 1)]  # five full pages and a token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny"))


def engine(model: Path, **settings: Any) -> Any:
    return lambda: tiny_engine(model, memory="2MiB", page_tokens=PAGE, max_num_seqs=8, max_batch_tokens=64, **settings)


def cached(url: str, **fields: Any) -> int | None:
    """Cached tokens of a request, by its answer."""
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details")
    return None if details is None else details["cached_tokens"]


def test_requests_share_prefixes_with_those_of_their_own_salt_only(model: Path) -> None:
    with serving(engine(model, prefix_cache=True)) as (url, _):
        assert [cached(url), cached(url)] == [0, 5 * PAGE]
        for salt in ("one tenant's", "another's"):
            assert [cached(url, cache_salt=salt), cached(url, cache_salt=salt)] == [0, 5 * PAGE], salt
        assert cached(url, cache_salt=None) == 5 * PAGE
        samples = scrape(url)
        assert value(samples, "prefix_cache_queries_total") == 7 * len(PROMPT)
        assert value(samples, "prefix_cache_hits_total") == 4 * 5 * PAGE
        assert value(samples, "pool_pages", owner="prefix") == 3 * 5
        assert value(samples, "pool_pages", owner="kv") == 0


def test_a_chat_and_a_stream_take_a_salt_too(model: Path) -> None:
    with serving(engine(model, prefix_cache=True)) as (url, _):
        body = {"model": "base", "prompt": PROMPT, "max_tokens": 2, "cache_salt": "x", "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        for expected in (0, 5 * PAGE):
            text = httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S).text
            assert f'"prompt_tokens_details":{{"cached_tokens":{expected}}}' in text
    with serving(FakeEngine) as (url, fake):
        answer = httpx.post(url + "/v1/completions", json=body | {"max_tokens": 1}, timeout=WAIT_S)
        assert "prompt_tokens_details" not in answer.text
        assert fake.salts == ["x"]  # type: ignore[attr-defined]


def test_without_a_prefix_cache_no_cached_tokens_are_told(model: Path) -> None:
    with serving(engine(model)) as (url, _):
        assert cached(url, cache_salt="x") is None


@pytest.mark.parametrize("salt", ["", "x" * 1025, 7, ["x"]])
def test_a_salt_is_a_text_of_some_length(salt: Any) -> None:
    with serving(FakeEngine) as (url, _):
        body = {"model": "base", "prompt": [1], "cache_salt": salt}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == "cache_salt"
        if isinstance(salt, str):
            assert error["message"] == f"cache_salt must be a text of 1 to 1024 characters, got {len(salt)} of them"
