"""Sampling parameters and requests are within their limits, or are not made."""

import pytest

from interleaf.core import Request, SamplingParams
from interleaf.errors import InvalidSamplingParams, RequestRejected


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129, 1.5, True, "2", None]),
        ("max_tokens", [0, -1, 2.0, None, "many"]),
        ("min_tokens", [-1, 0.5, None]),
        ("temperature", [-0.1, 101, float("nan"), float("inf"), "hot", None, True, 10**400]),
        ("top_k", [-1, 1.5, None]),
        ("top_p", [0, -0.5, 1.01, float("nan"), None]),
        ("min_p", [-0.01, 1.01, float("nan"), None]),
        ("repetition_penalty", [0, -1, 11, float("inf"), None]),
        ("presence_penalty", [-2.01, 2.01, float("nan"), None]),
        ("frequency_penalty", [-2.01, 2.01, None]),
        ("seed", [1.5, "1", 2**70, True]),
        ("logprobs", [-1, 1001, 1.5, True]),
        ("stop", [[""], [3], 5, None]),
        ("stop_token_ids", [[-1], ["a"], [1.5], 7, None]),
        ("ignore_eos", [None, 1, "no"]),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidSamplingParams, match=f"{name} must be"):
            SamplingParams(**{name: value})


def test_min_tokens_over_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidSamplingParams, match="min_tokens must be <= max_tokens=3, got 4"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_lists_and_single_stop_strings_become_tuples() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[1, 2])
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(stop=["\n"], stop_token_ids=(1, 2)))


@pytest.mark.parametrize(("id_", "tokens"), [("", (1,)), ("a", ()), ("a", (1, -2))])
def test_a_request_needs_an_id_and_a_prompt_of_token_ids(id_: str, tokens: tuple[int, ...]) -> None:
    with pytest.raises(RequestRejected):
        Request(id=id_, prompt_token_ids=tokens, params=SamplingParams())
