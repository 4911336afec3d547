"""Budgets too small for what they are for are refused before anything is read, with what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from interleaf import LLM
from interleaf.errors import ConfigError
from tests.support.tiny_models import make_model, save_model

PAGE_BYTES = 3072
"""Of 3 layers x 2 x 4 tokens x 2 KV heads x 16 x 4 bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama3"), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("swap_memory", [1, PAGE_BYTES - 1, "1KiB"])
def test_swap_memory_below_a_page_is_refused_with_the_page_s_bytes(folder: Path, swap_memory: int | str) -> None:
    with pytest.raises(ConfigError, match=rf"swap_memory=\d+ is less than a page, which takes {PAGE_BYTES} bytes"):
        LLM(str(folder), memory="4MiB", page_tokens=4, swap_memory=swap_memory)


def test_swap_memory_of_one_page_or_of_none_is_taken(folder: Path) -> None:
    for swap_memory, slots in ((0, 0), (PAGE_BYTES, 1)):
        with LLM(str(folder), memory="4MiB", page_tokens=4, swap_memory=swap_memory) as llm:
            assert llm.stats().swap_slots == slots
