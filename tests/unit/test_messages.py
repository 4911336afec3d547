"""What processes say to each other arrives as it was sent: every message, every exception of the tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interleaf import errors
from interleaf.config import EngineConfig
from interleaf.core import (
    AdapterFound,
    AdapterUid,
    FinishReason,
    ModelSpec,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestWaiting,
    RequestWaits,
    RopeKind,
    RopeSpec,
    SamplingParams,
    SequenceStart,
    StreamOrder,
    TokenEvent,
    TokenLogprobs,
)
from interleaf.engine import messages as m
from interleaf.engine.serving import EngineInfo
from interleaf.memory.geometry import PageGeometry
from interleaf.stats import EngineStats, PoolStats
from tests.support.peft_folders import MODEL

UID = AdapterUid("ab" * 32)
SPEC = dataclasses.replace(ModelSpec(**MODEL), rope=RopeSpec(kind=RopeKind.LLAMA3, factor=8.0), eos_token_ids=(2, 3))
ERROR = m.WireError.of(errors.AdapterNotFound("legal"))
STATS = EngineStats(
    PoolStats(9, 1, 3, 5, 4, 6, 4096),
    *range(13),
    waiting_by_reason={"pages": 2},
    load_counts=(1, 2),
    adapter_pages={UID: 3},
)

START = SequenceStart(1.5, 32, AdapterFound.LATE, 0.25, {"seats": 1.0, "pages": 0.5})
WAITING = RequestWaiting("r", 5.25, "pages", {"seats": 5.0, "pages": 0.25})
WAITS = RequestWaits({"seats": 1.0}, {"pages": 2.0})
ENDS = {
    "finished": (RequestFinished("r", WAITS), RequestFinished("s")),
    "aborted": (RequestAborted("t", WAITS),),
    "failed": (RequestFailed("u", "it was changed", WAITS),),
}

MESSAGES: list[tuple[Any, m.Message]] = [
    (m.ToEngine, m.Hello("api")),
    (m.ToEngine, m.Submit("r", (1, 2), SamplingParams(max_tokens=3), UID, "a salt")),
    (m.ToEngine, m.Abort("r", None)),
    (m.ToEngine, m.Abort("r", 3)),
    (m.ToEngine, m.AskStats(4)),
    (m.ToEngine, m.Register(1, UID, "/slabs/x.slab")),
    (m.ToEngine, m.Withdraw(UID)),
    (m.ToEngine, m.Fetched(UID, None, "it has changed")),
    (m.ToApi, m.Welcome(EngineInfo(256, 128, (2,), 8))),
    (m.ToApi, m.Refused("r", ERROR, True)),
    (m.ToApi, m.Events((TokenEvent("r", 0, 5, start=START), TokenEvent("r", 0, 6)), waiting=(WAITING,))),
    (m.ToApi, m.Events(**ENDS)),  # type: ignore[arg-type]
    (m.ToApi, m.Stats(4, STATS)),
    (m.ToApi, m.Stopping("the device has gone")),
    (m.EngineToPublisher, m.WelcomePublisher(SPEC, PageGeometry(4, 3, 2, 16, 4), "float32", StreamOrder.TILES, (UID,))),
    (m.EngineToPublisher, m.Fetch(UID, "folder")),
    (m.EngineToPublisher, m.Done(7)),
    (m.EngineToPublisher, m.Failed(7, ERROR)),
    (m.ToPublisher, m.Load(1, "legal", "folder")),
    (m.ToPublisher, m.Unload(2, "legal")),
    (m.ToPublisher, m.AskNames(3)),
    (m.FromPublisher, m.Taken(1)),
    (m.FromPublisher, m.Loaded(1, UID)),
    (m.FromPublisher, m.Names(3, 12, {"legal": UID})),
    (m.FromPublisher, m.Renamed(13, "legal", None)),
    (m.Report, m.Progress("weights", 1, 9)),
    (m.Report, m.StartFailed(ERROR)),
    (m.Report, m.Started()),
]


def arrived(kind: Any, message: Any) -> Any:
    return msgspec.msgpack.decode(m.encode(message), type=kind)


@pytest.mark.parametrize(("kind", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_arrives_as_it_was_sent(kind: Any, message: m.Message) -> None:
    assert arrived(kind, message) == message


def test_every_message_has_been_tried() -> None:
    tried = {type(message) for _, message in MESSAGES} | {m.Submit, m.Events}
    assert tried == set(m.Message.__subclasses__())


def floats() -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, width=32)


LOGPROBS = st.builds(
    TokenLogprobs,
    chosen=floats(),
    rank=st.integers(1, 2**31),
    top_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    top=st.lists(floats(), max_size=4).map(tuple),
)
TOKENS = st.builds(
    TokenEvent,
    request_id=st.text(min_size=1),
    index=st.integers(0, 127),
    token_id=st.integers(0, 2**31),
    logprobs=st.none() | LOGPROBS,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token=st.none() | st.integers(0, 2**31),
)


@given(st.lists(TOKENS, max_size=5).map(tuple), st.text(), st.text())
def test_events_arrive_as_they_were_sent(tokens: tuple[TokenEvent, ...], request_id: str, reason: str) -> None:
    sent = m.Events(
        tokens, (RequestFinished(request_id),), (RequestAborted(request_id),), (RequestFailed(request_id, reason),)
    )
    received = arrived(m.ToApi, sent)
    assert received == sent
    assert [type(token.finish_reason) for token in received.tokens] == [type(token.finish_reason) for token in tokens]


@given(
    st.lists(st.integers(0, 2**31), min_size=1, max_size=9).map(tuple),
    st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    st.lists(st.text(min_size=1), max_size=3),
    st.none() | st.just(UID),
)
def test_a_request_arrives_as_it_was_sent(
    prompt: tuple[int, ...], seed: int | None, stop: list[str], adapter: AdapterUid | None
) -> None:
    params = SamplingParams(seed=seed, stop=tuple(stop), stop_token_ids=(5,), temperature=0.7, logprobs=2, n=3)
    sent = m.Submit("p-1", prompt, params, adapter)
    assert arrived(m.ToEngine, sent) == sent


def test_settings_reach_a_child_as_they_were_made() -> None:
    boot = m.Boot("/run", "/slabs", "model", EngineConfig(memory="2MiB", seed=4), "a:b", {"port": [1, "x"]}, (5,))
    assert arrived(m.Boot, boot) == boot


ERRORS: list[errors.InterleafError] = [
    errors.ConfigError("port must be a whole number"),
    errors.ModelRejected("m", ["one", "two"]),
    errors.CheckpointError("gone"),
    errors.PoolTooSmall("adapter 'big'", 9, 4, "9 for itself"),
    errors.OutOfPages(4, 1),
    errors.AdapterRejected("acme", ["use_dora=True is not supported", "rank 0"]),
    errors.AdapterNotFound("acme"),
    errors.AdapterNameTaken("acme", UID),
    errors.AdapterLoadFailed(UID, "its source has changed"),
    errors.RequestRejected("too long"),
    errors.InvalidSamplingParams("top_p must be a number in (0, 1]"),
    errors.EngineDead("the engine has stopped"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_keeps_class_message_and_numbers(error: errors.InterleafError) -> None:
    again = arrived(m.WireError, m.WireError.of(error)).exception()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_foreign_exception_keeps_its_type_as_text() -> None:
    again = arrived(m.WireError, m.WireError.of(OSError(28, "No space left on device"))).exception()
    assert type(again) is errors.InterleafError
    assert str(again) == "OSError: [Errno 28] No space left on device"
