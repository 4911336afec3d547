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

    def find(self, text: str, num_new: int) -> tuple[int, str] | None:
        """The first match that ends in the last `num_new` characters: where it begins, and the string."""
        old = len(text) - num_new
        found = [
            (at, order) for order, s in enumerate(self._stop) if (at := text.find(s, max(0, old - len(s) + 1))) >= 0
        ]
        if not found:
            return None
        at, order = min(found)
        return at, self._stop[order]

    def held_from(self, text: str) -> int:
        """Where the longest end of `text` that may begin a stop string begins; the text's length if there is none."""
        held = len(text)
        for string in self._stop:
            at = text.find(string[0], max(0, len(text) - len(string) + 1), held)
            while at >= 0:
                if string.startswith(text[at:]):
                    held = at
                    break
                at = text.find(string[0], at + 1, held)
        return held


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What a completion has gained since the last one was taken. All deltas joined are the `CompletionOutput`.

    Attributes:
        text: what no later token can take back. Text that may be the beginning of a stop string comes when it is known
            not to be, so that a delta's text may lag behind its tokens.
        logprobs: one entry per token if they were asked for, else empty.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Completion:
    """One continuation while it grows.

    Stop strings are found here, where text is made, and not in the engine: `push` says when one was, the caller ends
    the sequence, and tokens that come later are not counted.

        text  | taken | may be shown | may be the beginning of a stop string |
              0       _num_taken_characters
    """

    index: int
    params: SamplingParams
    decoder: StreamDecoder | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    _num_taken_characters: int = 0
    _num_taken_tokens: int = 0

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

    def take(self) -> CompletionDelta:
        """What is new since the last call."""
        held = len(self.text)
        if self.finish_reason is None and self.params.stop:
            held = StopStrings(self.params.stop).held_from(self.text)
        text = self.text[self._num_taken_characters : held]
        token_ids, logprobs = self.token_ids[self._num_taken_tokens :], self.logprobs[self._num_taken_tokens :]
        self._num_taken_characters, self._num_taken_tokens = held, len(self.token_ids)
        return CompletionDelta(text, token_ids, logprobs)

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
