"""Request bodies: their fields, types and limits, and how bytes become them. A fault is a 400 that names the field.

msgspec reads a body in one pass, straight into the fields. What it refuses by itself: broken JSON, bad UTF-8, NaN,
numbers beyond every type, nesting deeper than the interpreter bears, unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from interleaf.core import SamplingParams
from interleaf.server import neutral
from interleaf.server.errors import ApiError, bad_request

_MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20
"""Most alternatives per token, as OpenAI and vLLM have it; the engine itself gives more."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 1024
_BODY_ITSELF = "$"

B = TypeVar("B", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream carries beside its tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions and chats have in common. null is the same as no value."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    @property
    def salt(self) -> str | None:
        """Only requests of the same salt share cached prefixes. Raises: ApiError: it is empty or too long."""
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_CHARACTERS:
            limit = f"a text of 1 to {MAX_SALT_CHARACTERS} characters"
            raise bad_request(f"cache_salt must be {limit}, got {len(self.cache_salt)} of them", "cache_salt")
        return self.cache_salt

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters. Raises: InvalidSamplingParams, ApiError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARACTERS for text in stop):
            limit = f"at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_CHARACTERS} characters"
            raise bad_request(f"stop must hold {limit}", "stop")
        given = {
            name: value
            for name in ("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p",
                         "repetition_penalty", "min_tokens", "ignore_eos")
            if (value := getattr(self, name)) is not None
        }  # fmt: skip
        top_k = given.get("top_k", 0)
        if top_k == -1 or top_k > _MAX_TOP_K:  # vLLM's way to say "all", and more than any model has
            given["top_k"] = 0
        return SamplingParams(
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            **given,
        )

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of counts. Raises: ApiError: an option asks for what is not here."""
        options = self.stream_options
        if options is None:
            return False
        if not self.stream:
            raise bad_request("stream_options is only allowed when stream is true", "stream_options")
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(options, name):
                raise ApiError(
                    400, f"{name} is not supported", param=f"stream_options.{name}", code="unsupported_parameter"
                )
        return bool(options.include_usage)


class CompletionFields(Sampling, kw_only=True):
    """The body of /v1/completions, less the fields of `neutral.COMPLETION`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class Part(Struct, forbid_unknown_fields=True):
    """A piece of a message's content; only type "text" is served."""

    type: str
    text: str | None = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class ChatFields(Sampling, kw_only=True):
    """The body of /v1/chat/completions, less the fields of `neutral.CHAT`."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of /tokenize: a text, or a chat's messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def _with_neutral(name: str, fields: type[B], more: Mapping[str, object]) -> type[B]:
    """`fields`, and one field of any type for every neutral one."""
    made = msgspec.defstruct(
        name, [(field, Any, None) for field in more], bases=(fields,), kw_only=True, forbid_unknown_fields=True
    )
    return made  # type: ignore[return-value]  # a subclass of `fields`


CompletionBody = _with_neutral("CompletionBody", CompletionFields, neutral.COMPLETION)
ChatBody = _with_neutral("ChatBody", ChatFields, neutral.CHAT)
BODIES: tuple[type[Struct], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {body: msgspec.json.Decoder(body) for body in BODIES}
_, COMPONENTS = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
"""What the OpenAPI document says of the bodies."""
for _body, _fields in ((CompletionBody, neutral.COMPLETION), (ChatBody, neutral.CHAT)):
    for _name, _values in _fields.items():
        if neutral.ANY not in _values:
            COMPONENTS[_body.__name__]["properties"][_name] = {"enum": [None, *_values]}


def described(body: type[Struct]) -> dict[str, Any]:
    """A route's request body, for its `openapi_extra`."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, kind: type[B]) -> B:
    """The body of a request. Raises: ApiError: 415 it is not sent as JSON, 400 it is not what it should be."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # A web page may send other types to any server that its visitor reaches, without asking.
        raise ApiError(415, f"content-type must be application/json, got {content_type[:100]!r}", code="invalid_type")
    return parse_body(await request.body(), kind)


def parse_body(content: bytes, kind: type[B]) -> B:
    """A body from JSON. Raises: ApiError: 400, with the path of the field as `param`."""
    try:
        body: B = _DECODERS[kind].decode(content)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json") from None
    return body


def _named(message: str) -> ApiError:
    """msgspec's message, with what it says about the place made a `param`."""
    what, _, place = message.rpartition(" - at `")
    what, place = (what, place.removesuffix("`")) if what else (message, _BODY_ITSELF)
    path = place.removeprefix(_BODY_ITSELF).removeprefix(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    if unknown:
        param = f"{path}.{unknown[1][:100]}".removeprefix(".")
        return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_parameter")
    missing = re.fullmatch(r"Object missing required field `(.*)`", what)
    if missing:
        param = f"{path}.{missing[1]}".removeprefix(".")
        return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
    return ApiError(400, f"{path or 'the body'}: {what}", param=path or None, code="invalid_type")
