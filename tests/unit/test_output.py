"""Texts from token events: stop strings cut where they begin, however tokens split them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interleaf.core import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from interleaf.engine.output import Completion, StopStrings


class Letters:
    """A decoder whose tokens are strings in a list; the last is held back until flushed, as half a character is."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.held = ""

    def push(self, token_id: int) -> str:
        text, self.held = self.held, self.pieces[token_id]
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def complete(pieces: list[str], params: SamplingParams, last: FinishReason = FinishReason.LENGTH) -> Completion:
    completion = Completion(0, params, Letters(pieces))  # type: ignore[arg-type]
    for token in range(len(pieces)):
        ends = token == len(pieces) - 1
        event = TokenEvent("r", 0, token, finish_reason=last if ends else None, stop_token=None)
        completion.push(event)
    return completion


@given(
    text=st.text("abc", min_size=1, max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_text_is_cut_at_the_first_stop_string_whatever_the_tokens(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]
    got = complete(pieces, SamplingParams(stop=stops, max_tokens=99))
    # As characters arrive, the text ends with the first one that completes a stop string.
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    if not ends:
        assert (got.text, got.finish_reason) == (text, FinishReason.LENGTH)
        return
    assert got.finish_reason is FinishReason.STOP
    assert got.stop_reason in stops
    assert text.startswith(got.text + str(got.stop_reason))
    assert len(got.text) <= min(text.find(s) for s in stops if s in text[: ends[0]])


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    got = complete(["on", "e\n", "two", "three", "four"], SamplingParams(stop=["\n"], max_tokens=99))
    assert got.text == "one"
    assert got.token_ids == [0, 1, 2]  # the third shows the second whole
    assert got.finish().stop_reason == "\n"


def test_stop_strings_count_only_after_min_tokens() -> None:
    got = complete(["a\n", "b\n", "c\n", "d"], SamplingParams(stop=["\n"], min_tokens=2, max_tokens=99))
    assert got.text == "a\nb"


def test_the_end_token_is_listed_but_has_no_text() -> None:
    got = complete(["hi", "<end>"], SamplingParams(max_tokens=9), FinishReason.STOP)
    assert (got.text, got.token_ids) == ("hi", [0, 1])


def test_logprobs_are_there_only_if_asked_for() -> None:
    entry = TokenLogprobs(-1.0, 1, (5,), (-1.0,))
    for asked in (None, 1):
        completion = Completion(0, SamplingParams(logprobs=asked), None)
        completion.push(TokenEvent("r", 0, 5, entry if asked else None, FinishReason.LENGTH))
        assert completion.finish().logprobs == ((entry,) if asked else None)


def test_the_earliest_of_several_matches_wins() -> None:
    assert StopStrings(("bc", "ab")).find("xabc", 4) == (1, "ab")
    assert StopStrings(("ab", "abc")).find("xabc", 4) == (1, "ab")
    assert StopStrings(("zz",)).find("xabc", 4) is None
    assert StopStrings(("ab",)).find("abxx", 1) is None, "an old match is not found again"


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_stop_string_across_pushes_is_found(new: int) -> None:
    assert StopStrings(("abc",)).find("xxabc", new) == (2, "abc")
