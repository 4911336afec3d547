"""transformers' reading of a GGUF file, without its repetitions. Changes nothing of what it reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import pytest


@contextmanager
def read_once() -> Iterator[None]:
    """In this block transformers parses a file once, not for each of its parts, and maps names once, not per module.

    Both are functions of their arguments, and take most of the seconds that loading the built-in model takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield
