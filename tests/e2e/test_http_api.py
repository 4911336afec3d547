"""The HTTP surface below what clients show: bytes of streams, error bodies, hostile bodies, the small endpoints.

A null engine answers, so that nothing here depends on a model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from interleaf.config import ServerConfig
from interleaf.core import Event, FinishReason, RequestFinished, TokenEvent
from interleaf.engine.tokenizer import Tokenizer, load_tokenizer
from interleaf.server.app import create_app
from interleaf.server.errors import ApiError
from interleaf.server.schemas import CompletionBody, parse_body
from tests.support.null_engine import NullEngine
from tests.support.tiny_text import save_tokenizer

T = TypeVar("T")
BASE = "tiny"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Where is the sea?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer is not None
    return tokenizer


class Api:
    """An application over a null engine, called in this process."""

    def __init__(
        self, tokenizer: Tokenizer | None, answer: str | list[int] = "The sea is wide.", **options: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.options = options

    def run(self, work: Callable[[httpx.AsyncClient, NullEngine], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            tokens = self.answer
            if isinstance(tokens, str):
                assert self.tokenizer is not None
                tokens = self.tokenizer.encode(tokens)
            engine = NullEngine(lambda prompt, index: tokens, max_model_len=256, **self.options)
            app = create_app(engine, self.tokenizer, ServerConfig(model=BASE))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await work(client, engine)

        return asyncio.run(run())

    def post(self, path: str, content: Any = None, **options: Any) -> httpx.Response:
        async def post(client: httpx.AsyncClient, engine: NullEngine) -> httpx.Response:
            if isinstance(content, bytes):
                headers = {"content-type": "application/json", **options.pop("headers", {})}
                return await client.post(path, content=content, headers=headers, **options)
            return await client.post(path, json=content, **options)

        return self.run(post)

    def get(self, path: str, **options: Any) -> httpx.Response:
        async def get(client: httpx.AsyncClient, engine: NullEngine) -> httpx.Response:
            return await client.get(path, **options)

        return self.run(get)


@pytest.fixture
def api(tokenizer: Tokenizer) -> Api:
    return Api(tokenizer, adapters=("red",))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, after a look at the shape that every error has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, after a look at its frame."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


# ---------------------------------------------------------------- streams


def test_a_chat_stream_has_openais_chunks(api: Api) -> None:
    body = {"model": "red", "messages": MESSAGES, "stream": True, "max_tokens": 3}
    first, *rest = events_of(api.post(CHAT, body, headers={"x-request-id": "abc"}))
    same = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "model": "red", "created": first["created"]}
    assert first == same | {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    }
    assert [chunk["choices"][0]["delta"] for chunk in rest] == [{"content": t} for t in ("The", " sea", " is")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None, None, "length"]
    assert all({key: chunk[key] for key in same} == same for chunk in rest)


def test_a_completion_stream_has_openais_chunks(api: Api) -> None:
    body = {"model": BASE, "prompt": "The", "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    one, two, last = events_of(api.post(COMPLETIONS, body))
    assert one["object"] == "text_completion"
    assert one["choices"] == [{"index": 0, "text": "The", "logprobs": None, "finish_reason": None}]
    assert two["choices"] == [
        {"index": 0, "text": " sea", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert one["usage"] is two["usage"] is None
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def test_fast_chunks_and_whole_answers_escape_text_alike(tokenizer: Tokenizer) -> None:
    text = '{"role": "user"}\n\n🎉é"'
    api = Api(tokenizer, text)
    body = {"model": BASE, "prompt": "The", "max_tokens": len(tokenizer.encode(text))}
    whole = api.post(COMPLETIONS, body).json()["choices"][0]["text"]
    streamed = events_of(api.post(COMPLETIONS, body | {"stream": True}))
    assert whole == text == "".join(chunk["choices"][0]["text"] for chunk in streamed)


def test_tokens_that_come_together_share_a_chunk_and_others_do_not(tokenizer: Tokenizer) -> None:
    class InBursts(NullEngine):
        """Says everything in as few words as its bursts are."""

        async def generate(self, *asked: Any) -> Any:
            tokens = tokenizer.encode("The sea is wide.")
            last = len(tokens) - 1
            events: list[Event] = [
                TokenEvent("r", 0, t, finish_reason=FinishReason.LENGTH if i == last else None)
                for i, t in enumerate(tokens)
            ]
            yield events[:1]
            yield events[1:4]
            yield [*events[4:], RequestFinished("r")]

    async def run() -> httpx.Response:
        app = create_app(InBursts(lambda prompt, index: []), tokenizer, ServerConfig(model=BASE))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(COMPLETIONS, json={"model": BASE, "prompt": "The", "stream": True})

    assert [chunk["choices"][0]["text"] for chunk in events_of(asyncio.run(run()))] == ["The", " sea is wide", "."]


def test_a_stop_string_of_one_continuation_ends_it_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, "The sea is wide.")

    async def work(client: httpx.AsyncClient, engine: NullEngine) -> tuple[httpx.Response, list[Any], int]:
        engine._answer = lambda prompt, index: tokenizer.encode("The sea is wide." if index else "A sea! is wide.")
        body = {"model": BASE, "prompt": "The", "n": 2, "max_tokens": 5, "stop": ["sea!"]}
        return await client.post(COMPLETIONS, json=body), engine.aborted, engine.num_running

    response, aborted, running = api.run(work)
    first, second = response.json()["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("A ", "stop", "sea!")
    assert (second["text"], second["finish_reason"]) == ("The sea is wide.", "length")
    assert [index for _, index in aborted] == [0]
    assert running == 0


def test_a_request_whose_continuations_have_all_met_stop_strings_ends_at_once(tokenizer: Tokenizer) -> None:
    api = Api(tokenizer, "The sea is wide.")

    async def work(client: httpx.AsyncClient, engine: NullEngine) -> tuple[httpx.Response, int]:
        body = {"model": BASE, "prompt": "The", "n": 2, "max_tokens": 200, "stop": [" is"]}
        return await client.post(COMPLETIONS, json=body), engine.num_running

    response, running = api.run(work)
    assert [choice["text"] for choice in response.json()["choices"]] == ["The sea"] * 2
    assert response.json()["usage"]["completion_tokens"] == 6
    assert running == 0


# ---------------------------------------------------------------- bodies of every kind


DEEP = b'{"model": "tiny", "prompt": "x", "metadata": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
HOSTILE = {
    "nothing": b"",
    "no object": b"[]",
    "a number": b"17",
    "broken": b'{"model": "tiny", ',
    "trailing": b'{"model": "tiny", "prompt": "x"} {}',
    "byte order mark": b'\xef\xbb\xbf{"model": "tiny", "prompt": "x"}',
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    "an endless exponent": b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    "a huge whole number": b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "a large whole number": b'{"model": "tiny", "prompt": "x", "max_tokens": 99999999999999999999999}',
    "a large seed": b'{"model": "tiny", "prompt": "x", "seed": 99999999999999999999999}',
    "a large token id": b'{"model": "tiny", "prompt": [99999999999999999999999]}',
    "a large stop token id": b'{"model": "tiny", "prompt": [5], "stop_token_ids": [-5]}',
    "a fraction of a token": b'{"model": "tiny", "prompt": "x", "max_tokens": 1.5}',
    "true for a number": b'{"model": "tiny", "prompt": "x", "max_tokens": true}',
    "deep nesting": DEEP,
    "deep nesting in an unknown field": b'{"zz": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "bad UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a surrogate in UTF-8": b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    "half a surrogate pair": b'{"model": "tiny", "prompt": "\\ud800 x"}',
    "a null byte": b'{"model": "tiny\x00", "prompt": "x"}',
    "a wrong type": b'{"model": ["tiny"], "prompt": "x"}',
    "an object for a text": b'{"model": "tiny", "prompt": {"a": "b"}}',
    "a mixture of prompts": b'{"model": "tiny", "prompt": ["x", 1, [2]]}',
    "prompts within prompts": b'{"model": "tiny", "prompt": [[[1]]]}',
    "an empty prompt in a list": b'{"model": "tiny", "prompt": [[]]}',
    "many prompts": b'{"model": "tiny", "prompt": ["x"' + b', "x"' * 50_000 + b"]}",
    "many continuations": b'{"model": "tiny", "prompt": "x", "n": 4096}',
    "many stop strings": b'{"model": "tiny", "prompt": "x", "stop": ["a"' + b', "a"' * 50_000 + b"]}",
    "a long unknown name": b'{"' + b"z" * 100_000 + b'": 1}',
    "a long model": b'{"model": "' + b"z" * 100_000 + b'", "prompt": "x"}',
    "a prompt that is too long": b'{"model": "tiny", "prompt": "' + b"sea " * 50_000 + b'"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_a_clear_4xx_and_the_server_goes_on(tokenizer: Tokenizer, name: str) -> None:
    async def work(client: httpx.AsyncClient, engine: NullEngine) -> tuple[httpx.Response, httpx.Response]:
        headers = {"content-type": "application/json"}
        refused = await client.post(COMPLETIONS, content=HOSTILE[name], headers=headers)
        return refused, await client.post(COMPLETIONS, json={"model": BASE, "prompt": "The", "max_tokens": 1})

    refused, served = Api(tokenizer).run(work)
    error = error_of(refused, 404 if name == "a long model" else 400)
    assert len(error["message"]) < 2100, "a client's own bytes are quoted, but not all of them"
    assert served.json()["choices"][0]["text"] == "The"


def test_a_body_must_say_that_it_is_json(api: Api) -> None:
    content = json.dumps({"model": BASE, "prompt": "The"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        error_of(api.post(COMPLETIONS, content, headers={"content-type": kind}), 415)
    assert api.post(COMPLETIONS, content, headers={"content-type": "Application/JSON; charset=utf-8"}).is_success


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"max_tokens": "x"}', "max_tokens"),
        (b'{"stop_token_ids": [1, "x"]}', "stop_token_ids[1]"),
        (b'{"stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        (b'{"stream_options": {"colour": 1}}', "stream_options.colour"),
        (b'{"colour": 1}', "colour"),
        (b'{"temperature": 1e999}', "temperature"),
    ],
)
def test_a_fault_is_named_by_its_path(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body, CompletionBody)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_null_means_the_default_in_every_field(api: Api) -> None:
    fields = dict.fromkeys(CompletionBody.__struct_fields__)
    body = fields | {"model": BASE, "prompt": "The"}
    assert api.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 16


def test_without_a_tokenizer_ids_are_served_and_texts_are_refused() -> None:
    api = Api(None, [5, 6, 7])
    body = {"model": BASE, "prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
    choice = api.post(COMPLETIONS, body | {"logprobs": 1}).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 7])
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
    streamed = events_of(api.post(COMPLETIONS, body | {"stream": True}))
    assert [t for chunk in streamed for t in chunk["choices"][0]["token_ids"]] == [5, 6, 7]
    assert error_of(api.post(COMPLETIONS, body | {"prompt": "x"}), 400)["param"] == "prompt"
    assert error_of(api.post(COMPLETIONS, body | {"stop": "x"}), 400)["param"] == "stop"
    assert error_of(api.post(CHAT, {"model": BASE, "messages": MESSAGES}), 400)["param"] == "messages"


def test_a_top_k_beyond_any_vocabulary_is_all_of_it() -> None:
    for top_k in (-1, 0, 2**31, 10**30):
        body = parse_body(json.dumps({"model": BASE, "top_k": top_k}).encode(), CompletionBody)
        assert body.sampling_params(4, None).top_k == 0


def test_without_a_tokenizer_a_stream_says_each_token_when_it_comes() -> None:
    api = Api(None, [5, 6, 7])
    body = {"model": BASE, "prompt": [1, 2], "max_tokens": 3, "stream": True}
    chunks = [chunk["choices"][0] for chunk in events_of(api.post(COMPLETIONS, body))]
    assert [chunk["token_ids"] for chunk in chunks] == [[], [5], [6], [7]], "ids are all that there is to say"
    silent = events_of(api.post(COMPLETIONS, body | {"return_token_ids": False}))
    assert [chunk["choices"][0]["text"] for chunk in silent] == ["", "", ""]
    assert "token_ids" not in silent[0]["choices"][0]


def test_a_client_that_goes_while_a_chunk_is_on_its_way_ends_its_request_at_once(tokenizer: Tokenizer) -> None:
    async def work() -> int:
        engine = NullEngine(lambda prompt, index: tokenizer.encode("The sea"), max_model_len=10**6)
        app = create_app(engine, tokenizer, ServerConfig(model=BASE))
        body = json.dumps({"model": BASE, "prompt": "The", "max_tokens": 10**5, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        is_stuck = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await is_stuck.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                is_stuck.set()
                await asyncio.Event().wait()  # as when the client's side of the connection is full

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope |= {"path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "root_path": "", "query_string": b""}
        await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
        return engine.num_running

    assert asyncio.run(work()) == 0


def test_a_failure_that_nobody_expected_tells_nothing_of_the_inside(api: Api) -> None:
    async def work(client: httpx.AsyncClient, engine: NullEngine) -> httpx.Response:
        def fail(prompt: Any, index: int) -> list[int]:
            raise OSError("/secret/path")

        engine._answer = fail
        return await client.post(COMPLETIONS, json={"model": BASE, "prompt": "The"})

    response = api.run(work)
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


# ---------------------------------------------------------------- the small endpoints


def test_unknown_paths_and_methods_have_the_same_error_shape(api: Api) -> None:
    error_of(api.get("/v1/chat"), 404)
    error_of(api.get(COMPLETIONS), 405)
    error_of(api.post("/v2/completions", {}), 404)


@pytest.mark.parametrize(
    ("given", "kept"), [("mine-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_a_request_id_is_kept_if_it_is_fit_for_a_header_and_a_log(api: Api, given: str, kept: bool) -> None:
    answered = api.get("/version", headers={"x-request-id": given}).headers["x-request-id"]
    assert (answered == given) is kept
    assert answered


def test_version_and_health_answer(api: Api) -> None:
    assert list(api.get("/version").json()) == ["version"]
    assert api.get("/health").status_code == 200

    async def work(client: httpx.AsyncClient, engine: NullEngine) -> httpx.Response:
        engine.die("the device is on fire")
        return await client.get("/health")

    assert error_of(api.run(work), 503)["code"] == "engine_dead"


def test_tokenize_and_detokenize_are_inverse(api: Api, tokenizer: Tokenizer) -> None:
    text = "A café in Zürich 🎉"
    got = api.post("/tokenize", {"model": "red", "prompt": text, "return_token_strs": True}).json()
    assert got["tokens"] == tokenizer.encode(text)
    assert (got["count"], got["max_model_len"], len(got["token_strs"])) == (len(got["tokens"]), 256, got["count"])
    assert api.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": text}
    assert api.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == tokenizer.apply_chat(MESSAGES)
    shorter = api.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert shorter == tokenizer.apply_chat(MESSAGES, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("/tokenize", {"prompt": ["a"]}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [256]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404),
    ],
)
def test_the_token_endpoints_refuse_by_name(api: Api, path: str, body: dict[str, Any], status: int) -> None:
    error_of(api.post(path, body), status)


def test_the_openapi_document_describes_every_body(api: Api) -> None:
    document = api.get("/openapi.json").json()
    described = document["components"]["schemas"]
    for path, name in ((COMPLETIONS, "CompletionBody"), (CHAT, "ChatBody"), ("/tokenize", "TokenizeBody")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert "model" in described[name]["properties"]
