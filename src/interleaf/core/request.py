"""What a caller asks for. Validated on construction: a value of these types is within its limits."""

from __future__ import annotations

from dataclasses import dataclass

from interleaf.core.adapter import AdapterUid
from interleaf.errors import InvalidSamplingParams, RequestRejected

MAX_LOGPROBS = 1000
"""Most alternatives returned per token."""

MAX_SEED = 2**63 - 1


def _require(ok: bool, name: str, limit: str, value: object) -> None:
    if not ok:
        raise InvalidSamplingParams(f"{name} must be {limit}, got {value!r}")


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    limit = f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    _require(ok, name, limit, value)


def _real(name: str, value: object, limit: str, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails every comparison, and whole numbers too large for a float compare as they should.
    ok = ok and (low < value if open_low else low <= value) and value <= high  # type: ignore[operator]
    _require(ok, name, limit, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. Names and meanings are those of vLLM and OpenAI.

    Attributes:
        n: sequences sampled independently from the prompt.
        max_tokens: output tokens at most, per sequence.
        min_tokens: no end token or stop token id is chosen before that many output tokens.
        temperature: 0 chooses the most probable token; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens whose probabilities sum to at least this; in (0, 1].
        min_p: keep tokens at least this fraction as probable as the most probable one; in [0, 1].
        repetition_penalty: over 1 makes tokens of prompt and output less probable (Keskar et al. 2019).
        presence_penalty, frequency_penalty: subtracted from the logits of output tokens, once or per occurrence.
        seed: makes the draw repeatable, whatever else is in the batch. None: an arbitrary seed.
        stop: strings that end the text; the string itself is cut off.
        stop_token_ids: tokens that end the sequence beside the model's own end tokens.
        ignore_eos: the model's end tokens do not end the sequence.
        logprobs: return the log-probability of each chosen token and of this many most probable ones, taken from
            the model's own distribution, before temperature and penalties. None: return none.

    Raises: InvalidSamplingParams: a value is out of range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, list | tuple), name, "a list", value)
            object.__setattr__(self, name, tuple(value))
        _whole("n", self.n, 1, 128)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        _require(self.min_tokens <= self.max_tokens, "min_tokens", f"<= max_tokens={self.max_tokens}", self.min_tokens)
        _real("temperature", self.temperature, "a number from 0 to 100", 0.0, 100.0)
        _whole("top_k", self.top_k, 0)
        _real("top_p", self.top_p, "a number in (0, 1]", 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, "a number in (0, 10]", 0.0, 10.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, "a number from -2 to 2", -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, "a number from -2 to 2", -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", "a non-empty string or a list of them", text)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false", self.ignore_eos)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on tokens seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, to be continued `params.n` times with one adapter (None = the base model).

    Whoever makes a Request holds a reference to its adapter until the request's terminal event.

    Attributes:
        cache_salt: only requests of the same salt share cached prefixes; a tenant's secret keeps it from learning, by
            the time its prompts take, what others have asked.

    Raises: RequestRejected: the id or the prompt is empty, or a token id is negative.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterUid | None = None
    arrival_s: float = 0.0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not self.id:
            raise RequestRejected("a request's id must not be empty")
        if not self.prompt_token_ids:
            raise RequestRejected(f"request {self.id}: the prompt has no tokens, at least 1 is needed")
        if min(self.prompt_token_ids) < 0:
            raise RequestRejected(f"request {self.id}: token id {min(self.prompt_token_ids)} is negative")
