"""Fields of OpenAI's and vLLM's requests that ask for what is not here: which values of them ask for nothing.

Clients send many fields at their defaults. Such a value is accepted, any other is refused by the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from interleaf.server.errors import ApiError

ANY = object()
"""The field says something about the request (who sent it, how to bill or cache it) and changes no answer."""

_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "metadata": (ANY,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "priority": (0,),
    "prompt_logprobs": (),
    "request_id": (ANY,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
COMPLETION: dict[str, tuple[Any, ...]] = _EVERYWHERE | {"prompt_embeds": (), "suffix": ("",)}
CHAT: dict[str, tuple[Any, ...]] = _EVERYWHERE | {
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "safety_identifier": (ANY,),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True, False),
    "mm_processor_kwargs": ({},),
}


def refuse_requests_for_more(body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises: ApiError: 400 for the first field whose value is neither null nor neutral."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and ANY not in values and not any(_same(value, neutral) for neutral in values):
            allowed = ", ".join(["null", *(msgspec.json.encode(v).decode() for v in values)])
            raise ApiError(
                400,
                f"{name} is not supported: only {allowed} is accepted, got {_short(value)}",
                param=name,
                code="unsupported_parameter",
            )


def _same(value: Any, neutral: Any) -> bool:
    """Equality that does not take 1 for true."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:80]}..."
