"""Adapters that come and go over HTTP: who may ask for it, for which paths, and that nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from interleaf.config import ServerConfig
from interleaf.core import AdapterUid
from interleaf.engine.serving import AsyncEngine
from interleaf.errors import AdapterLoadFailed, AdapterRejected, AdaptersUnavailable, PoolTooSmall
from interleaf.server.start import adapter_folders, load_adapters
from tests.e2e.test_metrics import scrape, value
from tests.support.asynchronous import asynchronous
from tests.support.peft_folders import Draft, write_defective
from tests.support.served import FakeEngine, error_of, serving, tiny_engine
from tests.support.tiny_models import make_model, save_model
from tests.support.waiting import WAIT_S

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = "a-key-of-more-than-16-characters"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An allowed root with one folder in it, and a secret beside it."""
    for name in ("root/good", "secret"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    return tmp_path / "root"


def fields(name: str = "a", path: str = "good") -> dict[str, str]:
    return {"lora_name": name, "lora_path": path}


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_with_a_key_whoever_has_it_loads_and_unloads(folder: Path) -> None:
    with (
        serving(adapters_dir=str(folder), api_key=(KEY,)) as (url, engine),
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            answer = client.post(LOAD, json=fields(), headers=headers)
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        answer = client.post(LOAD, json=fields(), headers=BEARER)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert engine.sources == {"a": str((folder / "good").resolve())}
        models = client.get("/v1/models", headers=BEARER).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("base", None), ("a", "base")]
        answer = client.post(UNLOAD, json={"lora_name": "a"}, headers=BEARER)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert engine.adapters() == ()


def test_without_a_key_only_this_machine_and_only_if_that_was_allowed(folder: Path) -> None:
    with serving(adapters_dir=str(folder)) as (url, _):
        answer = httpx.post(url + LOAD, json=fields(), timeout=WAIT_S)
        assert answer.status_code == 403
        assert "--allow-runtime-loading" in str(error_of(answer)["message"])
    with serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, _):
        assert httpx.post(url + LOAD, json=fields(), timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"X-Forwarded-For": "127.0.0.1"}, "proxy"),
        ({"Forwarded": "for=127.0.0.1"}, "proxy"),
        ({"Origin": "https://evil.example"}, "web page"),
        ({"Origin": "null"}, "web page"),
        ({"Host": "evil.example"}, "web page"),
        ({"Host": "localhost.evil.example:80"}, "web page"),
    ],
)
def test_without_a_key_a_proxy_or_a_web_page_does_not_count_as_this_machine(
    folder: Path, headers: dict[str, str], reason: str
) -> None:
    with serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine):
        answer = httpx.post(url + LOAD, json=fields(), headers=headers, timeout=WAIT_S)
        assert answer.status_code == 403
        assert reason in str(error_of(answer)["message"])
        assert engine.adapters() == ()


# --- for what ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../secret", "'..'"),
        ("link", "outside"),
        ("{root}/../secret", "'..'"),
        ("/etc", "outside"),
        ("http://169.254.169.254/", "URL"),
        ("file:///etc", "URL"),
        ("good\x00", "control"),
        ("dummy:r=4", "random adapters are not allowed"),
        ("nothing", "nothing is there"),
        (".", "allowed folder itself"),
    ],
)
def test_a_path_outside_the_allowed_folders_is_refused_and_the_engine_never_sees_it(
    folder: Path, path: str, reason: str
) -> None:
    with serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine):
        answer = httpx.post(url + LOAD, json=fields(path=path.replace("{root}", str(folder))), timeout=WAIT_S)
        assert answer.status_code == 400
        error = error_of(answer)
        assert reason in str(error["message"])
        assert any(reason in problem for problem in error["problems"])  # type: ignore[attr-defined]
        assert engine.adapters() == ()


@pytest.mark.parametrize(
    ("content", "kind", "status", "reason"),
    [
        (json.dumps(fields()), "text/plain", 415, "JSON"),
        ("{", "application/json", 400, "no JSON"),
        ("[" * 100_000, "application/json", 400, "no JSON"),
        (b"\xff\xfe", "application/json", 400, "no JSON"),
        ("[]", "application/json", 400, "must be a JSON object"),
        ("{}", "application/json", 400, "lora_name is missing; lora_path is missing"),
        (
            '{"lora_name": 3, "lora_path": ""}',
            "application/json",
            400,
            "lora_name must be a text .*; lora_path must be",
        ),
        (json.dumps(fields("\ud800")), "application/json", 400, "lora_name must be valid Unicode"),
        (json.dumps(fields() | {"lora_pth": 1}), "application/json", 400, "unknown field 'lora_pth'"),
        (json.dumps(fields() | {"load_inplace": True}), "application/json", 400, "load_inplace is not supported"),
        (json.dumps(fields("base")), "application/json", 400, "the base model's"),
        (json.dumps(fields("taken")), "application/json", 400, "'taken' is taken"),
    ],
)
def test_a_body_that_is_wrong_is_answered_with_what_is_wrong(
    folder: Path, content: str | bytes, kind: str, status: int, reason: str
) -> None:
    def engine() -> FakeEngine:
        return FakeEngine(("taken",))

    with serving(engine, adapters_dir=str(folder), allow_runtime_loading=True) as (url, _):
        answer = httpx.post(url + LOAD, content=content, headers={"Content-Type": kind}, timeout=WAIT_S)
        assert answer.status_code == status, answer.text
        assert re.search(reason, str(error_of(answer)["message"]))


def test_a_load_that_its_reader_did_not_survive_may_be_tried_again(folder: Path) -> None:
    with serving(FakeEngine, adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine):
        engine.refuse = AdaptersUnavailable("it has died")  # type: ignore[attr-defined]
        answer = httpx.post(url + LOAD, json=fields(), timeout=WAIT_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert error_of(answer)["code"] == "adapters_unavailable"
        engine.refuse = None  # type: ignore[attr-defined]
        assert httpx.post(url + LOAD, json=fields(), timeout=WAIT_S).status_code == 200


def test_vllms_neutral_fields_are_accepted_and_loading_the_same_again_changes_nothing(folder: Path) -> None:
    with serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine):
        body = fields() | {"load_inplace": False}
        assert [httpx.post(url + LOAD, json=body, timeout=WAIT_S).status_code for _ in range(2)] == [200, 200]
        assert engine.adapters() == ("a",)


def test_every_problem_the_engine_finds_is_in_the_answer(folder: Path) -> None:
    with serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine):
        engine.refuse = AdapterRejected("a", ["use_dora=True is not supported", "rank 0"])
        error = error_of(httpx.post(url + LOAD, json=fields(), timeout=WAIT_S))
        assert error["problems"] == ["use_dora=True is not supported", "rank 0"]
        assert "use_dora" in str(error["message"])
        assert "rank 0" in str(error["message"])
        engine.refuse = PoolTooSmall("adapter 'a'", 9, 4, "arithmetic")
        answer = httpx.post(url + LOAD, json=fields(), timeout=WAIT_S)
        assert (answer.status_code, "needs 9 pages" in answer.text) == (400, True)
        engine.die("gone")
        engine.refuse = None
        unknown = httpx.post(url + UNLOAD, json={"lora_name": "nobody"}, timeout=WAIT_S)
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "adapter_not_found")


# --- meanwhile --------------------------------------------------------------------------------------------------------


def test_requests_are_answered_while_loads_wait_and_loads_cannot_pile_up(folder: Path) -> None:
    with (
        serving(adapters_dir=str(folder), allow_runtime_loading=True) as (url, engine),
        ThreadPoolExecutor(16) as pool,
    ):
        engine.loading.clear()
        loads = [pool.submit(httpx.post, url + LOAD, json=fields(f"a{i}"), timeout=WAIT_S) for i in range(16)]
        try:
            while engine.num_loading < 16:
                assert httpx.get(url + "/health", timeout=WAIT_S).status_code == 200
            answer = httpx.post(
                url + "/v1/completions", json={"model": "base", "prompt": [1], "max_tokens": 2}, timeout=WAIT_S
            )
            assert answer.status_code == 200
            refused = httpx.post(url + LOAD, json=fields("one-more"), timeout=WAIT_S)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        finally:
            engine.loading.set()
        assert [load.result().status_code for load in loads] == [200] * 16
        assert httpx.post(url + LOAD, json=fields("one-more"), timeout=WAIT_S).status_code == 200


def test_load_use_and_unload_while_others_stream_disturb_no_stream(tmp_path: Path) -> None:
    model = save_model(make_model("llama3"), tmp_path / "model")
    root = tmp_path / "root"
    root.mkdir()
    Draft().write(root / "good")
    write_defective("dora", root / "bad")

    def engine() -> object:
        return tiny_engine(model, memory="4MiB", page_tokens=4, max_num_seqs=16, max_batch_tokens=64)

    def body(model_name: str, **more: object) -> dict[str, object]:
        common = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": model_name, **common, **more}

    def streamed(url: str, model_name: str, first: threading.Event | None = None, **more: object) -> list[int]:
        tokens: list[int] = []
        with httpx.stream(
            "POST", url + "/v1/completions", json=body(model_name, stream=True, **more), timeout=WAIT_S
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                    if first is not None and tokens:
                        first.set()
        return tokens

    with (
        serving(engine, adapters_dir=str(root), allow_runtime_loading=True) as (url, _),
        ThreadPoolExecutor(8) as pool,
    ):
        alone = streamed(url, "base")
        assert len(alone) == 40
        assert httpx.post(url + LOAD, json=fields("first"), timeout=WAIT_S).status_code == 200
        adapted = streamed(url, "first", max_tokens=90)
        assert adapted[:40] != alone

        started = threading.Event()
        others = [pool.submit(streamed, url, "base") for _ in range(4)]
        leaving = pool.submit(streamed, url, "first", started, max_tokens=90)
        assert started.wait(WAIT_S)
        assert httpx.post(url + UNLOAD, json={"lora_name": "first"}, timeout=WAIT_S).status_code == 200
        assert httpx.post(url + "/v1/completions", json=body("first"), timeout=WAIT_S).status_code == 404
        bad = httpx.post(url + LOAD, json=fields("bad", "bad"), timeout=WAIT_S)
        assert (bad.status_code, "use_dora" in bad.text) == (400, True)
        assert httpx.post(url + LOAD, json=fields("second"), timeout=WAIT_S).status_code == 200
        assert streamed(url, "second", max_tokens=90) == adapted
        assert leaving.result() == adapted, "a request that runs keeps its adapter"
        assert [other.result() for other in others] == [alone] * 4


# --- at the start -----------------------------------------------------------------------------------------------------


@asynchronous
async def test_at_start_named_adapters_must_load_and_those_of_a_folder_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    config = ServerConfig(model="base", adapters=(("named", "somewhere"),), adapters_dir=str(folder))
    await load_adapters(engine, config, lambda what, done, total: None)
    assert engine.adapters() == ("named", "good", "link")

    class Picky(FakeEngine):
        async def load_adapter(self, name: str, source: str) -> object:  # type: ignore[override]
            if name in ("good", "named"):
                raise AdapterRejected(name, ["no"])
            return await super().load_adapter(name, source)

    with pytest.raises(AdapterRejected, match="named: no"):
        await load_adapters(Picky(), config, lambda what, done, total: None)
    picky = Picky()
    await load_adapters(picky, ServerConfig(model="base", adapters_dir=str(folder)), lambda what, done, total: None)
    assert picky.adapters() == ("link",)
    assert "adapter 'good' is left out: no" in caplog.text


def test_a_folder_of_adapters_is_those_folders_in_it_that_have_a_config(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert list(adapter_folders(str(folder))) == ["good", "link"]
    assert adapter_folders(None) == {}


def test_a_copy_that_breaks_fails_its_requests_and_no_others_and_is_made_again_when_asked(tmp_path: Path) -> None:
    model = save_model(make_model("llama3"), tmp_path / "model")

    async def prepare(engine: AsyncEngine) -> None:
        for i, name in enumerate(("good", "bad")):
            await engine.load_adapter(name, f"dummy:r=4,targets=all,seed={i}")

    def ask(name: str) -> httpx.Response:
        body = {"model": name, "prompt": [5, 6], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        return httpx.post(url + "/v1/completions", json=body, timeout=WAIT_S)

    settings = {"memory": "4MiB", "page_tokens": 4, "max_num_seqs": 8, "max_batch_tokens": 64}
    with serving(lambda: tiny_engine(model, **settings), prepare) as (url, engine):
        parts = engine._client._parts  # type: ignore[attr-defined]
        copier, bad = parts.runner._copier, parts.registry.uid("bad")
        image = copier._image

        def breaking(uid: AdapterUid) -> object:
            if uid == bad:
                raise AdapterLoadFailed(uid, "half of it is gone")
            return image(uid)

        copier._image = breaking
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, ("bad", "good", "base") * 2))
        assert [answer.status_code for answer in answers] == [500, 200, 200] * 2
        assert error_of(answers[0])["code"] == "request_failed"
        assert "half of it is gone" in str(error_of(answers[0])["message"])
        samples = scrape(url)
        assert 1 <= value(samples, "adapter_failed_loads_total") <= 2
        assert value(samples, "pool_pages", owner="kv") == 0
        assert value(samples, "pool_pages", owner="adapter") == value(samples, "adapter_resident_pages", adapter="good")
        assert value(samples, "adapter_load_seconds_count") == value(samples, "adapters_resident") == 1
        copier._image = image
        assert ask("bad").status_code == 200


@asynchronous
async def test_at_start_several_adapters_are_loaded_at_a_time_and_a_failure_ends_the_others() -> None:
    begun: list[str] = []
    all_begun = asyncio.Event()

    class Waiting(FakeEngine):
        async def load_adapter(self, name: str, source: str) -> object:  # type: ignore[override]
            begun.append(name)
            if len(begun) == 4:
                all_begun.set()
            await all_begun.wait()
            if name == "third":
                raise AdapterRejected(name, ["no"])
            return await super().load_adapter(name, source)

    told: list[int] = []
    names = ("first", "second", "fourth", "fifth")
    config = ServerConfig(model="base", adapters=tuple((name, "somewhere") for name in names))
    engine = Waiting()
    await load_adapters(engine, config, lambda what, done, total: told.append(done))
    assert sorted(engine.adapters()) == sorted(names)
    assert told == [1, 2, 3, 4]

    begun.clear()
    before = asyncio.all_tasks()
    many = [f"a{i}" for i in range(40)]
    config = ServerConfig(model="base", adapters=tuple((name, "somewhere") for name in (*many, "third")))
    with pytest.raises(AdapterRejected, match="third"):
        await load_adapters(Waiting(), config, lambda what, done, total: None)
    assert asyncio.all_tasks() == before
