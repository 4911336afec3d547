"""The official `openai` client against a real server and engine: answers are `LLM`'s, errors its own classes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from interleaf import LLM, SamplingParams
from interleaf.config import EngineConfig, ServerConfig
from interleaf.engine.build import build_engine
from interleaf.engine.client import InProcessClient
from interleaf.engine.serving import AsyncEngine, EngineInfo, ThreadEngine
from interleaf.engine.tokenizer import load_tokenizer
from interleaf.server.app import create_app
from tests.support.local_server import LocalServer
from tests.support.null_engine import NullEngine
from tests.support.tiny_models import make_model, save_model
from tests.support.tiny_text import save_tokenizer
from tests.support.waiting import WAIT_S

ADAPTERS = {name: f"dummy:r=4,targets=all,seed={seed}" for seed, name in enumerate(("red", "green", "blue", "team/a"))}
BASE = "tiny"
ENGINE: dict[str, Any] = {"memory": "16MiB", "seed": 0, "max_num_seqs": 16}
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
ENDLESS = 10**6
"""Tokens of a stream that never ends by itself: it fills the buffers of its connection long before."""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the sea?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny") / BASE)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    async def build() -> tuple[FastAPI, AsyncEngine]:
        parts = build_engine(str(folder), EngineConfig.from_mapping(ENGINE))
        client = InProcessClient(parts)
        for name, source in ADAPTERS.items():
            client.add_adapter(name, source)
        info = EngineInfo(
            parts.spec.vocab_size, parts.max_model_len, tuple(parts.spec.eos_token_ids), parts.config.max_num_seqs
        )
        engine = ThreadEngine(client, info)
        return create_app(engine, load_tokenizer(str(folder)), ServerConfig(model=str(folder))), engine

    with LocalServer(build) as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, adapters=ADAPTERS, **ENGINE) as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_page_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, whatever it broke off, no request and no page of KV remains."""
    yield
    if "server" in request.fixturenames:
        engine_is_idle(request.getfixturevalue("server"))


def engine_is_idle(server: LocalServer) -> None:
    async def idle() -> bool:
        stats = await server.engine.stats()
        return stats.pool.kv_pages == 0 and stats.running_sequences == stats.waiting_sequences == 0

    server.until(idle)


def llm_text(llm: LLM, prompt: Any, adapter: str | None = None, **params: Any) -> str:
    return llm.generate(prompt, SamplingParams(**params), adapter)[0].outputs[0].text


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("adapter", [None, "red", "team/a"])
def test_a_completion_is_what_llm_gives_streamed_or_not(client: openai.OpenAI, llm: LLM, adapter: str | None) -> None:
    expected = llm_text(llm, "Where is the sea", adapter, **GREEDY)
    model = adapter or BASE
    whole = client.completions.create(model=model, prompt="Where is the sea", **GREEDY)
    streamed = list(client.completions.create(model=model, prompt="Where is the sea", stream=True, **GREEDY))
    assert whole.choices[0].text == expected != ""
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected
    assert {whole.model, *(chunk.model for chunk in streamed)} == {model}
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("adapter", [None, "green"])
def test_a_chat_is_what_llm_gives_streamed_or_not(client: openai.OpenAI, llm: LLM, adapter: str | None) -> None:
    expected = llm_text(llm, CHAT, adapter, **GREEDY)
    model = adapter or BASE
    whole = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    streamed = list(client.chat.completions.create(model=model, messages=CHAT, stream=True, **GREEDY))
    assert whole.choices[0].message.content == expected != ""
    assert whole.choices[0].message.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
    assert [chunk.choices[0].delta.role for chunk in streamed[:2]] == ["assistant", None]
    assert whole.model == streamed[0].model == model


def test_adapters_answer_differently(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model=model, prompt="Where", **GREEDY).choices[0].text for model in (BASE, *ADAPTERS)
    }
    assert len(texts) == 1 + len(ADAPTERS)


def test_usage_counts_prompt_and_output_and_ends_a_stream_if_asked(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt = len(llm.tokenizer.encode("The sea"))
    whole = client.completions.create(model=BASE, prompt="The sea", max_tokens=7, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        prompt, 7, prompt + 7,
    )  # fmt: skip
    for stream in (
        client.chat.completions.create(
            model=BASE, messages=CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ),
        client.completions.create(
            model=BASE, prompt="The sea", max_tokens=5, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ),
    ):  # fmt: skip
        *chunks, last = list(stream)
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 5
    unasked = list(client.completions.create(model=BASE, prompt="The sea", max_tokens=5, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in unasked)


def test_n_continuations_of_several_prompts_come_in_order(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["The sea", "A café", "0123"]
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
    expected = [c.text for o in llm.generate(prompts, SamplingParams(**params)) for c in o.outputs]
    whole = client.completions.create(model=BASE, prompt=prompts, **params)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [choice.text for choice in whole.choices] == expected
    assert len(set(expected)) == 6
    texts = [""] * 6
    for chunk in client.completions.create(model=BASE, prompt=prompts, stream=True, **params):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_token_ids_are_a_prompt_alone_or_in_a_list(client: openai.OpenAI, llm: LLM) -> None:
    one, two = [134, 115, 9], [17, 80]
    expected = [llm_text(llm, ids, **GREEDY) for ids in (one, two)]
    assert client.completions.create(model=BASE, prompt=one, **GREEDY).choices[0].text == expected[0]
    both = client.completions.create(model=BASE, prompt=[one, two], **GREEDY)
    assert [choice.text for choice in both.choices] == expected


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=BASE, prompt="The sea", **GREEDY).choices[0].text
    assert client.completions.create(model=BASE, prompt="The sea", echo=True, **GREEDY).choices[0].text == (
        "The sea" + plain
    )
    stream = client.completions.create(model=BASE, prompt=[134, 115], echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == "The sea" + plain


@pytest.mark.parametrize("cut", [3, 9, 20])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_stop_string_ends_the_text_and_is_never_streamed(
    client: openai.OpenAI, llm: LLM, cut: int, length: int
) -> None:
    stop = llm_text(llm, "The sea is", "blue", **GREEDY)[cut : cut + length]
    expected = llm_text(llm, "The sea is", "blue", stop=[stop, "no such text"], **GREEDY)
    request = {"model": "blue", "prompt": "The sea is", "stop": [stop, "no such text"], **GREEDY}
    whole = client.completions.create(**request)
    streamed = list(client.completions.create(stream=True, **request))
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed) == expected
    assert stop not in expected
    assert whole.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == "stop"
    assert streamed[-1].choices[0].model_extra == whole.choices[0].model_extra == {"stop_reason": stop}


def test_a_stop_token_ends_the_text_and_is_named(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.generate("The sea", SamplingParams(**GREEDY))[0].outputs[0].token_ids
    got = client.completions.create(
        model=BASE, prompt="The sea", **GREEDY, extra_body={"stop_token_ids": [tokens[6]], "return_token_ids": True}
    ).choices[0]
    first = tokens.index(tokens[6]) + 1
    assert got.finish_reason == "stop"
    assert got.model_extra == {
        "stop_reason": tokens[6], "token_ids": list(tokens[:first]), "prompt_token_ids": [134, 115],
    }  # fmt: skip


def test_streamed_token_ids_joined_are_the_answers(client: openai.OpenAI, llm: LLM) -> None:
    tokens = llm.generate(CHAT, SamplingParams(**GREEDY))[0]
    stream = list(
        client.chat.completions.create(
            model=BASE, messages=CHAT, stream=True, **GREEDY, extra_body={"return_token_ids": True}
        )
    )
    assert (stream[0].model_extra or {})["prompt_token_ids"] == list(tokens.prompt_token_ids)
    ids = [id_ for chunk in stream[1:] for id_ in (chunk.choices[0].model_extra or {})["token_ids"]]
    assert ids == list(tokens.outputs[0].token_ids)


def test_completion_logprobs_have_openais_shape_and_llms_values(client: openai.OpenAI, llm: LLM) -> None:
    output = llm.generate("The sea", SamplingParams(logprobs=3, **GREEDY))[0].outputs[0]
    assert output.logprobs is not None
    request = {"model": BASE, "prompt": "The sea", "logprobs": 3, **GREEDY}
    got = client.completions.create(**request).choices[0].logprobs
    assert got is not None
    assert got.token_logprobs == pytest.approx([entry.chosen for entry in output.logprobs], abs=5e-4)
    assert got.tokens is not None
    assert got.top_logprobs is not None
    assert got.text_offset is not None
    assert all(token in top for token, top in zip(got.tokens, got.top_logprobs, strict=True))
    assert got.text_offset[:2] == [0, len(got.tokens[0])]
    streamed = [
        c.choices[0].logprobs for c in client.completions.create(stream=True, **request) if c.choices[0].logprobs
    ]
    assert [t for part in streamed for t in part.tokens or ()] == got.tokens
    assert [t for part in streamed for t in part.text_offset or ()] == got.text_offset


def test_chat_logprobs_have_openais_shape_and_llms_values(client: openai.OpenAI, llm: LLM) -> None:
    output = llm.generate(CHAT, SamplingParams(logprobs=2, **GREEDY))[0].outputs[0]
    assert output.logprobs is not None
    request: dict[str, Any] = {"model": BASE, "messages": CHAT, "logprobs": True, "top_logprobs": 2, **GREEDY}
    got = client.chat.completions.create(**request).choices[0].logprobs
    assert got is not None
    assert got.content is not None
    assert [entry.logprob for entry in got.content] == pytest.approx([e.chosen for e in output.logprobs], abs=5e-4)
    for entry in got.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the chosen one is the most probable
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    streamed = client.chat.completions.create(stream=True, **request)
    parts = [e.token for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert parts == [entry.token for entry in got.content]
    without = client.chat.completions.create(model=BASE, messages=CHAT, logprobs=True, max_tokens=1).choices[0].logprobs
    assert without is not None
    assert [entry.top_logprobs for entry in without.content or ()] == [[]]


def test_sampling_extensions_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    params = {"max_tokens": 20, "temperature": 1.5, "seed": 11, "top_p": 0.9, "frequency_penalty": 0.5}
    more = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 20, "ignore_eos": True}
    expected = llm_text(llm, "The sea", **params, **more)
    got = client.completions.create(model=BASE, prompt="The sea", extra_body=more, **params)
    assert got.choices[0].text == expected != llm_text(llm, "The sea", **params)


def test_a_chat_without_a_limit_may_fill_the_context(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model=BASE, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert got.usage.total_tokens == 256
    capped = client.chat.completions.create(
        model=BASE, messages=CHAT, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert capped.usage is not None
    assert capped.usage.completion_tokens == 3


def test_models_lists_the_base_and_its_adapters(client: openai.OpenAI) -> None:
    listed = {model.id: (model.model_extra or {})["parent"] for model in client.models.list()}
    assert listed == {BASE: None} | dict.fromkeys(ADAPTERS, BASE)
    assert client.models.retrieve("team/a").id == "team/a"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("teams")


def test_the_clients_request_id_comes_back(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=BASE, prompt="The", max_tokens=1, extra_headers={"X-Request-Id": "mine-17"}
    )
    assert raw.headers["x-request-id"] == "mine-17"
    assert raw.parse().id == "cmpl-mine-17"


# ---------------------------------------------------------------- many at once


def test_streams_beside_streams_that_are_killed_end_right(server: LocalServer, llm: LLM) -> None:
    prompts = [f"{number} guests say" for number in range(32)]
    models = [list(ADAPTERS)[number % len(ADAPTERS)] for number in range(32)]
    killed = set(range(0, 32, 3))
    outputs = llm.generate(prompts, SamplingParams(**GREEDY, ignore_eos=True), adapter=models)

    def read(number: int) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model=models[number],
                prompt=prompts[number],
                stream=True,
                extra_body={"ignore_eos": True},
                **GREEDY,
            )
            text = ""
            for position, chunk in enumerate(stream):
                text += chunk.choices[0].text
                if number in killed and position == 1:
                    stream.close()
                    return text
            return text

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(read, range(32)))
    for number, output in enumerate(outputs):
        if number not in killed:
            assert texts[number] == output.outputs[0].text, number
    engine_is_idle(server)


# ---------------------------------------------------------------- errors, by the client's classes


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        ({"prompt": "e" * 200, "max_tokens": 100}, "prompt", "context_length_exceeded"),
        ({"prompt": [5, 256]}, "prompt", "invalid_value"),
        ({"prompt": [5, -1]}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"echo": True, "logprobs": 1}, "echo", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "unsupported_parameter"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": ["x"] * 100}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens", "invalid_value"),
    ],
)
def test_a_bad_completion_request_names_its_field(
    client: openai.OpenAI, request_: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": BASE, "prompt": "The sea", **request_})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "e" * 300}]}, "messages", "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]", "invalid_value",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ],
)  # fmt: skip
def test_a_bad_chat_request_names_its_field(
    client: openai.OpenAI, request_: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": BASE, "messages": CHAT, **request_})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.completions.create(model="pirate", prompt="x"),
        lambda: client.completions.create(model="pirate", prompt="x", stream=True),
        lambda: client.chat.completions.create(model="pirate", messages=CHAT),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def null_server(**options: Any) -> LocalServer:
    async def build() -> tuple[FastAPI, AsyncEngine]:
        engine = NullEngine(lambda prompt, index: [5, 6, 7], max_num_seqs=1, **options)
        return create_app(engine, None, ServerConfig(model=BASE, max_waiting=1)), engine

    return LocalServer(build)


def null_engine(server: LocalServer) -> NullEngine:
    assert isinstance(server.engine, NullEngine)
    return server.engine


def hold(server: LocalServer) -> None:
    async def clear() -> None:
        null_engine(server).held.clear()

    server.call(clear)


def release(server: LocalServer) -> None:
    async def set_() -> None:
        null_engine(server).held.set()

    server.call(set_)


def running(server: LocalServer, count: int) -> None:
    async def holds() -> bool:
        return null_engine(server).num_running == count

    server.until(holds)


def test_a_full_queue_is_a_rate_limit_with_a_time_to_retry() -> None:
    with null_server() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        hold(server)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(client.completions.create, model=BASE, prompt=[1]) for _ in range(2)]
            running(server, 2)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(model=BASE, prompt=[1], stream=stream)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.code == "rate_limit_exceeded"
            release(server)
            assert all(answer.result().choices[0].finish_reason == "length" for answer in waiting)
        with pytest.raises(openai.BadRequestError):  # more than will ever fit; while the queue is full nobody looks
            client.completions.create(model=BASE, prompt=[1], n=3)
        assert client.completions.create(model=BASE, prompt=[1], n=2).usage is not None, "the places are free again"


def test_a_client_that_times_out_frees_its_request() -> None:
    with null_server() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        hold(server)
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(model=BASE, prompt=[1], stream=stream, timeout=0.3)
            running(server, 0)


def test_a_stream_that_is_closed_frees_its_request() -> None:
    with (
        null_server(max_model_len=2 * ENDLESS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=BASE, prompt=[1], max_tokens=ENDLESS, stream=True, extra_body={"return_token_ids": True}
        )
        next(iter(stream))
        running(server, 1)
        stream.close()
        running(server, 0)


def test_a_dead_engine_is_an_internal_server_error_before_and_within_a_stream() -> None:
    with (
        null_server(max_model_len=2 * ENDLESS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=BASE, prompt=[1], max_tokens=ENDLESS, stream=True, extra_body={"return_token_ids": True}
        )
        next(iter(stream))

        async def die() -> None:
            null_engine(server).die("the device is on fire")

        server.call(die)
        with pytest.raises(openai.APIError, match="on fire"):
            list(stream)
        for late in (False, True):
            with pytest.raises(openai.InternalServerError, match="on fire") as caught:
                client.completions.create(model=BASE, prompt=[1], stream=late)
            assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 503


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # no other server can take the port, and this one does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            client.models.list()
