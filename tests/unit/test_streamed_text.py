"""Text as a stream shows it: never a character that a stop string takes back, and whole in the end."""

from hypothesis import given
from hypothesis import strategies as st

from interleaf.core import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from interleaf.engine.output import Completion, StopStrings


class Pieces:
    """A decoder whose token i is the i-th string."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def stream(pieces: list[str], params: SamplingParams) -> tuple[Completion, list[str]]:
    """The completion, and what was shown after each token."""
    completion = Completion(0, params, Pieces(pieces))  # type: ignore[arg-type]
    shown = []
    for token in range(len(pieces)):
        ends = FinishReason.LENGTH if token == len(pieces) - 1 else None
        completion.push(TokenEvent("r", 0, token, finish_reason=ends))
        shown.append(completion.take().text)
    return completion, shown


@given(
    pieces=st.lists(st.text("abc", max_size=4), min_size=1, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 5),
)
def test_what_was_shown_is_the_final_text(pieces: list[str], stop: list[str], min_tokens: int) -> None:
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=99)
    completion, shown = stream(pieces, params)
    assert "".join(shown) == completion.finish().text


@given(text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    beginnings = {s[:length] for s in stop for length in range(1, len(s))}
    held = max((n for n in range(len(text) + 1) if n == 0 or text[len(text) - n :] in beginnings), default=0)
    assert StopStrings(tuple(stop)).held_from(text) == len(text) - held


def test_text_is_held_back_until_it_is_no_stop_string() -> None:
    _, shown = stream(["one\n", "\ntwo", "\n", "x"], SamplingParams(stop=["\n\n\n"], max_tokens=9))
    assert shown == ["one", "\n\ntwo", "", "\nx"]


def test_held_text_is_shown_when_the_sequence_ends_otherwise() -> None:
    _, shown = stream(["a", "st", "o"], SamplingParams(stop=["stop"], max_tokens=9))
    assert shown == ["a", "", "sto"]


def test_a_stop_string_is_never_shown() -> None:
    completion, shown = stream(["a", "st", "op", "b"], SamplingParams(stop=["stop"], max_tokens=9))
    assert shown == ["a", "", "", ""]
    assert completion.finish().stop_reason == "stop"


def test_a_match_that_ended_before_min_tokens_is_not_found_later() -> None:
    # A longer stop string must not widen the search for a shorter one.
    completion, shown = stream(
        ["a\n", "b", "c", "d"], SamplingParams(stop=["\n", "xxxxxx"], min_tokens=2, max_tokens=9)
    )
    assert completion.text == "".join(shown) == "a\nbcd"


def test_tokens_and_logprobs_are_taken_once() -> None:
    entry = TokenLogprobs(-1.0, 1, (5,), (-1.0,))
    completion = Completion(0, SamplingParams(logprobs=1, stop=["zz"]), Pieces(["z", "a"]))  # type: ignore[arg-type]
    completion.push(TokenEvent("r", 0, 0, entry))
    first = completion.take()
    completion.push(TokenEvent("r", 0, 1, entry))
    second = completion.take()
    assert (first.text, first.token_ids, first.logprobs) == ("", [0], [entry])
    assert (second.text, second.token_ids, second.logprobs) == ("za", [1], [entry])
