"""The public surface: what `from interleaf import ...` gives, and nothing by accident."""

import interleaf


def test_the_public_names_are_these() -> None:
    assert sorted(interleaf.__all__) == [
        "CompletionOutput",
        "FinishReason",
        "InterleafError",
        "LLM",
        "RequestOutput",
        "SamplingParams",
        "TokenLogprobs",
        "__version__",
    ]
    assert sorted(interleaf.__all__) == dir(interleaf)


def test_every_public_name_can_be_had_and_others_cannot() -> None:
    assert all(getattr(interleaf, name) is not None for name in interleaf.__all__)
    assert not hasattr(interleaf, "Scheduler")
