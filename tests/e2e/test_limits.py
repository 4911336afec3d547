"""Requests of people who mean no good, or whose client is broken: a clear answer, a server that lives, memory flat."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest

from interleaf.server.auth import ApiKeys
from interleaf.server.open_files import connections_at_most, raise_limit
from tests.support.served import FakeEngine, error_of, serving

WAIT_S = 20.0
MAX_BODY = 64 * 1024
MAX_HEADER = 8 * 1024
GOOD = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 3}
CHUNKED = b"Transfer-Encoding: chunked"
KEY = "a-key-of-more-than-16-characters"


SIZES = {"max_body_bytes": MAX_BODY, "max_header_bytes": MAX_HEADER}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeEngine, **SIZES) as (url, _):
        yield url


@pytest.fixture(scope="module")
def hasty_url() -> Iterator[str]:
    """For those that are too slow. On a busy machine anybody may be."""
    with serving(FakeEngine, header_timeout=0.5, body_timeout=0.5, **SIZES) as (url, _):
        yield url


def send(url: str, *parts: bytes, close: bool = False) -> bytes:
    """Write bytes as they are, then read until the server closes or has given one whole answer."""
    address = urlsplit(url)
    with closing(socket.create_connection((address.hostname, address.port), WAIT_S)) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if close:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered already
        answer = b""
        while not _is_whole(answer):
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                break
            if not piece:
                break
            answer += piece
        return answer


def _is_whole(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return bool(separator) and len(body) >= int(line.partition(b":")[2])
    return False


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions", length: int | None = None) -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers]
    if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in headers):
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def completion(**fields: object) -> bytes:
    return post(json.dumps(GOOD | fields).encode())


def raw(text: str) -> bytes:
    return post(text.encode())


@dataclass(frozen=True)
class Hostile:
    """What is sent, and the statuses that are an answer to it."""

    parts: Callable[[], list[bytes]]
    statuses: tuple[int, ...] = (400,)


def one(data: Callable[[], bytes] | bytes, *statuses: int) -> Hostile:
    return Hostile(lambda: [data() if callable(data) else data], statuses or (400,))


HOSTILE = {
    # sizes
    "a body that says it is too large": one(post(b"{}", length=10**15), 413, 408),
    "a body that is too large": one(lambda: post(b" " * (MAX_BODY + 1)), 413),
    "a body of 32 MB": one(lambda: post(b"x" * 32_000_000), 413),
    "chunks that add up to too much": Hostile(
        lambda: [post(b"", CHUNKED), *[b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * 8, b"0\r\n\r\n"], (413,)
    ),
    "one header of 1 MB": one(lambda: post(b"{}", b"X: " + b"a" * 1_000_000), 431),
    "a header that never ends": Hostile(lambda: [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 65536] * 64], (431,)),
    "ten thousand headers": one(lambda: post(b"{}", *[b"X-%d: y" % i for i in range(10_000)]), 431),
    "two hundred small headers": one(lambda: post(b"{}", *[b"X%d: y" % i for i in range(200)]), 431),
    "a path of 1 MB": one(lambda: post(b"{}", path=b"/" + b"a" * 1_000_000), 431),
    "trailers without end": Hostile(
        lambda: [post(b"", CHUNKED) + b"2\r\n{}\r\n0\r\n", *[b"T: " + b"x" * 16_000 + b"\r\n"] * 16], (431, 408)
    ),
    # slowness
    "headers that stop": one(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", 408),
    "a body that stops": one(post(b'{"model": "ba', length=5000), 408),
    "chunks that stop": one(post(b"", CHUNKED) + b"5\r\n{", 408),
    "nothing at all": one(b"", 408),
    # no HTTP
    "no HTTP": one(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)),
    "a made-up version": one(b"GET / HTTP/9.9\r\n\r\n"),
    "a length that is no number": one(post(b"{}", b"Content-Length: ten")),
    "a negative length": one(post(b"{}", b"Content-Length: -5")),
    "two lengths": one(post(b"{}", b"Content-Length: 2", b"Content-Length: 3")),
    "a length and chunks": one(post(b"{}", b"Content-Length: 2", CHUNKED)),
    "bytes in the path": one(b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400, 404),
    "a way out of the tree": one(b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "another method": one(b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    # JSON
    "broken JSON": one(raw('{"model": "base", ')),
    "an empty body": one(post(b"")),
    "bad UTF-8": one(post(b'{"model": "base", "prompt": "\xff\xfe"}')),
    "half a surrogate": one(raw('{"model": "base", "prompt": "\\ud800"}')),
    "deep arrays": one(raw("[" * 30_000)),
    "deep objects": one(raw('{"a":' * 10_000 + "1" + "}" * 10_000)),
    "a deep prompt": one(raw('{"model":"base","prompt":' + "[" * 20_000 + "]" * 20_000 + "}")),
    "an array": one(raw("[1, 2]")),
    "a number": one(raw("17")),
    "null": one(raw("null")),
    "a field twice, then another": one(raw('{"model":"base","model":"base","prompt":[1],"zzz":1}')),
    # values
    "a number beyond a float": one(raw('{"model":"base","prompt":[1],"temperature":1e999}')),
    "a number of 4000 digits": one(raw('{"model":"base","prompt":[1],"max_tokens":' + "9" * 4000 + "}")),
    "NaN": one(raw('{"model":"base","prompt":[1],"temperature":NaN}')),
    "a negative count": one(completion(max_tokens=-1)),
    "an absurd count": one(completion(max_tokens=2**62)),
    "an absurd n": one(completion(n=10**9)),
    "absurd logprobs": one(completion(logprobs=10**9)),
    "an absurd seed": one(completion(seed=10**30)),
    "a token id beyond the vocabulary": one(completion(prompt=[2**40])),
    "a negative token id": one(completion(prompt=[-1])),
    "true as a token id": one(completion(prompt=[True])),
    "a prompt of mixed kinds": one(completion(prompt=[1, "a", [2]])),
    "no prompt": one(completion(prompt=[])),
    "a model that is a list": one(completion(model=["base"])),
    "a model that is not there": one(completion(model="../../base"), 404),
    "an unknown field": one(completion(__proto__={"a": 1})),
    "a million stop strings": one(completion(stop=["x"] * 10_000)),
}  # fmt: skip


def test_there_are_at_least_thirty() -> None:
    assert len(HOSTILE) >= 30


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_gets_a_clear_answer_and_the_next_client_notices_nothing(
    url: str, hasty_url: str, name: str
) -> None:
    is_slow = 408 in HOSTILE[name].statuses
    asked = hasty_url if is_slow else url
    answer = send(asked, *HOSTILE[name].parts())
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status in HOSTILE[name].statuses, answer[:500]
    error_of(httpx.Response(status, content=body))
    assert len(body) < 5000, "an answer does not repeat what was sent"
    good = httpx.post(asked + "/v1/completions", json=GOOD, timeout=WAIT_S)
    while is_slow and good.status_code == 408:
        good = httpx.post(asked + "/v1/completions", json=GOOD, timeout=WAIT_S)
    assert good.status_code == 200, good.text


def test_memory_stays_flat_under_all_of_them(url: str) -> None:
    def everything() -> None:
        for hostile in HOSTILE.values():
            if 408 not in hostile.statuses:  # those only wait
                send(url, *hostile.parts())

    for _ in range(2):
        everything()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        everything()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 * 1024, f"the peak has grown by {grown} KiB"


def test_a_client_that_writes_all_of_a_body_before_it_reads_still_sees_the_413(url: str) -> None:
    answer = httpx.post(url + "/v1/completions", content=b"x" * 8_000_000, timeout=WAIT_S)
    assert answer.status_code == 413
    assert f"at most {MAX_BODY} bytes" in str(error_of(answer)["message"])


def test_a_client_that_asks_first_is_told_before_it_sends(url: str) -> None:
    head = post(b"", b"Expect: 100-continue", length=MAX_BODY + 1)
    assert send(url, head).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_exactly_the_limit_is_accepted_and_its_connection_goes_on(url: str) -> None:
    body = json.dumps(GOOD).encode()
    body += b" " * (MAX_BODY - len(body))
    with httpx.Client(base_url=url) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("connection") != "close"


def test_headers_in_small_pieces_and_pipelined_requests_are_served(url: str) -> None:
    request = completion()
    assert send(url, *[request[i : i + 7] for i in range(0, len(request), 7)]).startswith(b"HTTP/1.1 200 ")
    answer = send(url, request * 2 + b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_connections_over_the_limit_are_told_so_and_served_once_others_have_gone() -> None:
    with serving(FakeEngine, max_connections=2) as (url, _):
        with httpx.Client(base_url=url) as first, httpx.Client(base_url=url) as second:
            assert first.get("/health").status_code == 200
            assert second.get("/health").status_code == 200
            third = send(url, completion())
            assert third.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in third.lower()
            error_of(httpx.Response(503, content=third.partition(b"\r\n\r\n")[2]))
        while httpx.post(url + "/v1/completions", json=GOOD).status_code == 503:
            pass


def test_while_the_queue_is_full_nothing_is_parsed() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    def holding() -> FakeEngine:
        loops.append(asyncio.get_running_loop())
        engine = FakeEngine()
        engine.held.clear()
        return engine

    with serving(holding, max_waiting=1) as (url, engine):
        assert isinstance(engine, FakeEngine)
        places = engine.info.max_num_seqs + 1
        body = {"model": "base", "prompt": [[1, 2]] * places, "max_tokens": 3}
        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(httpx.post, url + "/v1/completions", json=body, timeout=WAIT_S)
            while engine.num_running < places:
                assert not filling.done()
            for refused in (raw('{"model": "base", '), completion(), post(b"{", path=b"/v1/chat/completions")):
                answer = send(url, refused)
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: 1" in answer.lower()
            assert send(url, raw("{").replace(b"/v1/completions", b"/tokenize")).startswith(b"HTTP/1.1 400 ")
            engine.die("it has been held for long enough")
            loops[0].call_soon_threadsafe(engine.held.set)
            assert filling.result().status_code == 503


def test_over_the_limit_of_connections_one_can_still_ask_whether_the_server_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("interleaf.server.protocol.connections_at_most", lambda max_connections: 4)
    with serving(FakeEngine, max_connections=2) as (url, _), ExitStack() as others:
        for _ in range(2):
            client = others.enter_context(httpx.Client(base_url=url))
            assert client.get("/health").status_code == 200
        for path in ("/health", "/metrics"):
            answer = httpx.get(url + path)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert httpx.get(url + "/version").status_code == 503
        address = urlsplit(url)
        idle = [closing(socket.create_connection((address.hostname, address.port), WAIT_S)) for _ in range(2)]
        silent = [others.enter_context(each) for each in idle]
        refused = send(url)
        assert refused.startswith(b"HTTP/1.1 503 "), "too many even to be heard"
        silent.pop().close()
        while httpx.get(url + "/health").status_code == 503:
            pass


# --- keys and origins -------------------------------------------------------------------------------------------------


def test_a_key_opens_everything_and_without_it_only_health_and_metrics_answer() -> None:
    with (
        serving(FakeEngine, api_key=("first-key-of-many-letters", KEY)) as (url, _),
        httpx.Client(base_url=url) as client,
    ):
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        for path in ("/v1/models", "/version", "/openapi.json", "/nowhere", "//health", "/health/"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error_of(answer)["type"] == "authentication_error"
        for key in ("first-key-of-many-letters", KEY):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for wrong in (
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            f"Basic {KEY}",
            KEY,
            "Bearer",
            b"Bearer \xff\xfe",
        ):
            assert client.get("/v1/models", headers=[("Authorization", wrong)]).status_code == 401  # type: ignore[list-item]
        twice = [("Authorization", f"Bearer {KEY}")] * 2
        assert client.get("/v1/models", headers=twice).status_code == 401


def test_metrics_can_be_put_behind_the_key() -> None:
    with serving(FakeEngine, api_key=(KEY,), protect_metrics=True) as (url, _):
        assert httpx.get(url + "/metrics").status_code == 401
        assert httpx.get(url + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_a_body_is_not_read_for_somebody_without_a_key() -> None:
    with serving(FakeEngine, api_key=(KEY,), body_timeout=60.0) as (url, _):
        assert send(url, post(b"{", length=1000)).startswith(b"HTTP/1.1 401 ")


def test_keys_are_compared_in_full_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert ApiKeys(["a", "b", "c"]).opens("Bearer a")
    assert len(set(compared)) == 3, "a match does not end the comparison"
    assert not ApiKeys([]).opens("Bearer a")


def test_only_web_pages_of_allowed_origins_may_call() -> None:
    with serving(FakeEngine, cors_origin=("https://chat.example",), api_key=(KEY,)) as (url, _):
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        allowed = httpx.options(url + "/v1/completions", headers={"Origin": "https://chat.example", **ask})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        refused = httpx.options(url + "/v1/completions", headers={"Origin": "https://evil.example", **ask})
        assert "access-control-allow-origin" not in refused.headers
        answer = httpx.post(url + "/v1/completions", json=GOOD, headers={"Origin": "https://chat.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://chat.example")
    with serving(FakeEngine) as (url, _):
        answer = httpx.get(url + "/health", headers={"Origin": "https://chat.example"})
        assert "access-control-allow-origin" not in answer.headers


# --- open files -------------------------------------------------------------------------------------------------------


def test_the_limit_of_open_files_is_raised_and_said_and_too_low_a_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [1000, 30_000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(slice(None), new))
    caplog.set_level(logging.INFO, logger="interleaf")
    raise_limit(max_connections=1024)
    assert limits == [30_000, 30_000]
    assert connections_at_most(1024) == 1024 + 16384
    assert connections_at_most(20_000) == connections_at_most(10**6) == 30_000 - 256
    raise_limit(max_connections=40_000)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "limit of open files raised from 1000 to 30000"),
        ("WARNING", "max_connections=40000 needs 40256 open files, 30000 are allowed (ulimit -n): connections over "
         "29744 are refused"),
    ]  # fmt: skip


def test_a_limit_of_open_files_that_cannot_be_raised_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(which: int, new: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    caplog.set_level(logging.INFO, logger="interleaf")
    raise_limit(max_connections=100)
    assert "cannot be raised" in caplog.records[0].getMessage()
    assert connections_at_most(100) == 1
