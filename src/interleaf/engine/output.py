"""What callers get back, and how it is put together from token events: text, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from interleaf.core import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from interleaf.engine.tokenizer import StreamDecoder


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the request's `n`.
        token_ids: the output tokens; the end token or stop token id that ended it, if any, is the last of them.
        text: their text without special tokens, cut before a stop string; "" when the model has no tokenizer.
        logprobs: one entry per token if `SamplingParams.logprobs` asked for them, else None.
        finish_reason: None only if the request failed.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its continuations.

    Attributes:
        adapter: the adapter's name; None for the base model.
        error: why the request could not be answered (`outputs` holds what there was until then); else None.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    adapter: str | None
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None


class StopStrings:
    """Watches a growing text for strings that end it. The earliest match wins; of several there, the first listed."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._reach = max(map(len, stop), default=0) - 1

    def find(self, text: str, num_new: int) -> tuple[int, str] | None:
        """The first match that ends in the last `num_new` characters: where it begins, and the string."""
        begin = max(0, len(text) - num_new - self._reach)
        found = [(at, order) for order, s in enumerate(self._stop) if (at := text.find(s, begin)) >= 0]
        if not found:
            return None
        at, order = min(found)
        return at, self._stop[order]


@dataclass(slots=True)
class Completion:
    """One continuation while it grows.

    Stop strings are found here, where text is made, and not in the engine: `push` says when one was, the caller ends
    the sequence, and tokens that come later are not counted.
    """

    index: int
    params: SamplingParams
    decoder: StreamDecoder | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def push(self, event: TokenEvent) -> bool:
        """Take in a token. Returns: whether a stop string has just ended the text."""
        if self.finish_reason is not None:
            return False
        self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if (
            self.decoder is not None
            and event.finish_reason is not FinishReason.STOP
            and self._append(self.decoder.push(event.token_id))
        ):
            return True
        if event.finish_reason is None:
            return False
        self.finish_reason = event.finish_reason
        if event.stop_token in self.params.stop_token_ids:
            self.stop_reason = event.stop_token
        return self.decoder is not None and self._append(self.decoder.flush())

    def finish(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _append(self, new: str) -> bool:
        self.text += new
        if not new or not self.params.stop or len(self.token_ids) <= self.params.min_tokens:
            return False
        match = StopStrings(self.params.stop).find(self.text, len(new))
        if match is None:
            return False
        at, string = match
        self.text = self.text[:at]
        self.finish_reason, self.stop_reason = FinishReason.STOP, string
        return True
