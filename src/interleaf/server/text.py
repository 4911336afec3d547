"""Token ids as text in answers: single tokens for log-probabilities, whole prompts for echo. No HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from interleaf.engine.tokenizer import Tokenizer

T = TypeVar("T")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONG_BYTES = 8192
"""A body that long takes milliseconds to tokenise, and the streams of everybody else would stand still for them."""


async def tokenised(body_bytes: int, work: Callable[[], T]) -> T:
    """What `work` returns, done on another thread if the body is long. The tokenizer lets go of the interpreter."""
    return work() if body_bytes < _LONG_BYTES else await asyncio.to_thread(work)


class TokenTexts:
    """The text of single tokens, remembered.

    A token that is no text by itself (part of a character, no tokenizer) is written "token_id:17", so that different
    tokens stay different in an answer whose keys they are.

    Attributes:
        has_tokenizer: without one no text is ever made.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.has_tokenizer = tokenizer is not None
        self._known: dict[int, str] = {}
        self._before: list[int] = []
        if tokenizer is not None:
            # A decoder may trim the first token's space: tokens are decoded after another one, whose text is cut off.
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._cut = len(self._decode([]))

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._text(token_id)
        return text

    def raw_bytes(self, token_id: int) -> list[int] | None:
        """UTF-8 bytes of a token's text; None if it is no text by itself."""
        text = self[token_id]
        return None if text == _name(token_id) else list(text.encode())

    def joined(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None or token_id >= self._tokenizer.vocab_size:
            return _name(token_id)
        text = self._decode([token_id])[self._cut :]
        return _name(token_id) if _REPLACEMENT in text else text

    def _decode(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(self._before + ids, skip_special_tokens=False)


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
