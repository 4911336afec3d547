"""Links carry messages both ways, see the other side's death, and never make their sender wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from interleaf.engine import channel
from interleaf.engine.channel import AsyncLink, Endpoint, Link
from tests.support.asynchronous import asynchronous
from tests.support.waiting import eventually


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Short: the kernel allows about 100 characters."""
    return str(tmp_path_factory.mktemp("s") / "e")


@pytest.fixture
def endpoint(path: str) -> Iterator[Endpoint]:
    endpoint = Endpoint(path)
    yield endpoint
    endpoint.close()


def wait_for(endpoint: Endpoint, count: int) -> list[tuple[bytes, bytes]]:
    messages: list[tuple[bytes, bytes]] = []

    def have_come() -> bool:
        endpoint.wait(0.1)
        messages.extend(endpoint.receive())
        return len(messages) >= count

    eventually(have_come)
    return messages


def hear(link: Link) -> list[bytes]:
    """The next messages that a link is sent."""
    heard: list[bytes] = []

    def have_come() -> bool:
        link.wait(0.1)
        heard.extend(link.receive())
        return bool(heard)

    eventually(have_come)
    return heard


def test_messages_go_both_ways_in_order(endpoint: Endpoint, path: str) -> None:
    first, second = Link(path), Link(path)
    for number in range(5):
        first.send(b"%d" % number)
    second.send(b"other")
    messages = wait_for(endpoint, 6)
    (peer,) = {peer for peer, data in messages if data != b"other"}
    assert [data for sender, data in messages if sender == peer] == [b"0", b"1", b"2", b"3", b"4"]
    endpoint.send(peer, b"answer")
    assert hear(first) == [b"answer"]
    assert second.receive() == []
    first.close()
    second.close()


def test_a_link_that_ends_is_noticed_once(endpoint: Endpoint, path: str) -> None:
    link = Link(path)
    link.send(b"hello")
    ((peer, _),) = wait_for(endpoint, 1)
    assert (endpoint.peers(), endpoint.departed()) == ((peer,), [])
    link.close()
    departed: list[bytes] = []

    def is_noticed() -> bool:
        endpoint.wait(0.1)
        departed.extend(endpoint.departed())
        return bool(departed)

    eventually(is_noticed)
    assert (departed, endpoint.peers(), endpoint.departed()) == ([peer], (), [])
    endpoint.send(peer, b"too late")  # is nobody's
    assert not endpoint.has_backlog


def test_a_peer_that_does_not_read_never_makes_the_sender_wait(
    endpoint: Endpoint, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_BACKLOG_BYTES", 2**20)
    deaf, good = Link(path), Link(path)
    deaf.send(b"deaf")
    good.send(b"good")
    names = {data: peer for peer, data in wait_for(endpoint, 2)}
    sent = 0
    while not endpoint.departed():  # a sender that waited would hang here
        endpoint.send(names[b"deaf"], bytes(2**16))
        endpoint.flush()
        sent += 1
        assert sent < 10**5, "nothing limits what is kept for a peer that does not read"
    assert endpoint.peers() == (names[b"good"],)
    assert not endpoint.has_backlog
    endpoint.send(names[b"good"], b"hello")
    assert hear(good) == [b"hello"]
    deaf.close()
    good.close()


def test_what_was_kept_arrives_in_order_once_the_peer_reads(endpoint: Endpoint, path: str) -> None:
    link = Link(path)
    link.send(b"hello")
    ((peer, _),) = wait_for(endpoint, 1)
    count = 0
    while not endpoint.has_backlog or count % 10:
        endpoint.send(peer, b"%d" % count + bytes(2**12))
        count += 1
    heard: list[bytes] = []
    while len(heard) < count:
        endpoint.flush()
        link.wait(0.1)
        heard += link.receive()
    assert [int(data.rstrip(b"\0")) for data in heard] == list(range(count))
    link.close()


def test_a_new_endpoint_takes_the_place_of_one_that_was_killed(path: str) -> None:
    for suffix in ("", ".life"):
        Path(path + suffix).touch()
    Endpoint(path).close()


def test_a_link_does_not_wait_for_an_endpoint_that_has_died(path: str) -> None:
    endpoint = Endpoint(path)
    listener = endpoint._listener.dup()  # its file stays, as that of a process that was killed does
    endpoint.close()
    listener.close()
    with pytest.raises(ConnectionError, match="nobody answers"):
        Link(path)


@asynchronous
async def test_an_event_loop_hears_messages_and_the_end(path: str) -> None:
    endpoint = Endpoint(path)
    link = await AsyncLink.open(path)
    link.send(b"hello")
    ((peer, data),) = await asyncio.to_thread(wait_for, endpoint, 1)
    assert data == b"hello"
    endpoint.send(peer, b"answer")
    assert await link.receive() == b"answer"
    died = asyncio.create_task(link.died())
    await asyncio.sleep(0)
    assert not died.done()
    endpoint.close()
    await died
    link.close()
