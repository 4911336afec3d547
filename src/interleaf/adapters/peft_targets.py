"""Which modules a PEFT config targets, with which rank and alpha: PEFT's matching, on names alone. Reads no file.

PEFT matches a module's full name in the model that was trained, such as `model.layers.3.self_attn.q_proj`. Facts about
the matching: PEFT 0.21, `check_target_module_exists` (tuners/tuners_utils.py), `get_pattern_key` (utils/other.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import regex  # type: ignore[import-untyped]

from interleaf.adapters.peft_config import PeftConfig
from interleaf.adapters.problems import shown
from interleaf.core import GROUP_MODULES, LoraGroup, Module

_N = TypeVar("_N", int, float)

_ANY_LAYERS = re.compile(r".*?\.[^.]*\.([0-9]+)\.")

_ATTENTION = frozenset(GROUP_MODULES[LoraGroup.QKV] + GROUP_MODULES[LoraGroup.O])

_MAX_MATCHING_S = 10.0
"""Seconds for all matching of one adapter: expressions come from strangers, and some take exponential time.

`re` cannot be interrupted. The `regex` package can, and reads what `re` accepts as `re` does; but it writes counted
repetitions out when it compiles, and takes time exponential in the depth of nested ones, so those are limited, and so
is the length.
"""

_MAX_PATTERN_CHARS = 10_000
_MAX_REPEATS = 1000
_MAX_DEPTH = 10
_COUNTED = re.compile(r"\{([0-9]*),?([0-9]*)\}")


class PatternError(Exception):
    """A regular expression is malformed, or matching takes too long; the message is a sentence that names it."""


@lru_cache(maxsize=4096)  # all adapters of a model have the same names
def module_name(prefix: str, layer: int, module: Module) -> str:
    """A module's full name in a model whose list of layers is `prefix` + "layers"."""
    return f"{prefix}layers.{layer}.{'self_attn' if module in _ATTENTION else 'mlp'}.{module}"


class Targets:
    """Answers for one config; one instance per adapter, because it counts the time spent matching."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        targets = config.target_modules
        self._suffixes = tuple(f".{name}" for name in targets) if isinstance(targets, tuple) else ()
        self._compiled: dict[str, Any] = {}
        self._until_s = time.monotonic() + _MAX_MATCHING_S

    def targeted(self, name: str) -> bool:
        """Whether PEFT would put LoRA on the linear layer of that full name.

        Raises: PatternError
        """
        config = self._config
        assert config.target_modules is not None, "the selection was refused"
        if self._excluded(name):
            return False
        if isinstance(config.target_modules, str):
            if config.target_modules.lower() == "all-linear":
                return not name.endswith(("lm_head", "embed_tokens"))
            return self._match("target_modules", config.target_modules, name, full=True) is not None
        if name in config.target_modules:  # a full name is not subject to layers_to_transform
            return True
        if not name.endswith(self._suffixes):
            return False
        return config.layers_to_transform is None or self._layer_index(name) in config.layers_to_transform

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ranks that the config allows for a module.

        PEFT takes the first pattern that matches, but sorts patterns when it saves; so where several match, the file
        no longer says which one was first in training, and any of them is allowed.

        Raises: PatternError
        """
        assert self._config.r is not None, "the ranks were refused"
        found = tuple(self._matching("rank_pattern", self._config.rank_pattern, name))
        return found or (self._config.r,)

    def alpha(self, name: str) -> float:
        """The alpha of a module: of the first pattern that matches, as PEFT reads the file.

        Raises: PatternError
        """
        assert self._config.lora_alpha is not None, "the alphas were refused"
        return next(self._matching("alpha_pattern", self._config.alpha_pattern, name), self._config.lora_alpha)

    def _excluded(self, name: str) -> bool:
        excluded = self._config.exclude_modules
        if isinstance(excluded, str):
            return self._match("exclude_modules", excluded, name, full=True) is not None
        return any(name == e or name.endswith(f".{e}") for e in excluded or ())

    def _layer_index(self, name: str) -> int | None:
        """The first number in a name that PEFT takes for the layer's."""
        if not self._config.layers_pattern:
            found = _ANY_LAYERS.match(name)
            return int(found[1]) if found else None
        for pattern in self._config.layers_pattern:
            match = self._match("layers_pattern", pattern, name, inside=r"(?:^|.*?\.)%s\.(\d+)\.")
            if match is not None:
                return int(match[match.re.groups])  # the last group is ours
        return None

    def _matching(self, field: str, patterns: Iterable[tuple[str, _N]], name: str) -> Iterator[_N]:
        for pattern, value in patterns:
            if self._match(field, pattern, name, inside=r"(.*\.)?(%s)$") is not None:
                yield value

    def _match(self, field: str, pattern: str, name: str, *, inside: str = "%s", full: bool = False) -> Any:
        """Match a config's pattern, as a part of what PEFT makes of it, against a name."""
        expression = inside.replace("%s", pattern)
        try:
            if time.monotonic() > self._until_s:
                raise TimeoutError
            if expression not in self._compiled:
                self._compiled[expression] = _compile(expression)
            compiled = self._compiled[expression]
            match = compiled.fullmatch if full else compiled.match
            return match(name, timeout=max(self._until_s - time.monotonic(), 0.001))
        except TimeoutError:
            problem = f"does not match {name} within {_MAX_MATCHING_S:g} s of matching"
        except (re.error, regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            problem = f"is not a usable regular expression: {error}"
        raise PatternError(f"{field}: {shown(pattern)} {problem}")


def _compile(expression: str) -> Any:
    """Compile for matching with a time limit. Raises: ValueError, and whatever `re` and `regex` raise."""
    if len(expression) > _MAX_PATTERN_CHARS:
        raise ValueError(f"{len(expression)} characters, at most {_MAX_PATTERN_CHARS} are read")
    repeats = 1
    for match in _COUNTED.finditer(expression):
        repeats *= max([1, *(int(count[:9]) for count in match.groups() if count)])
        if repeats > _MAX_REPEATS:
            raise ValueError(f"its counts multiply to more than {_MAX_REPEATS} repetitions")
    if _depth(expression) > _MAX_DEPTH:
        raise ValueError(f"its groups are nested more than {_MAX_DEPTH} deep")
    re.compile(expression)
    return regex.compile(expression, regex.VERSION0, cache_pattern=False)


def _depth(expression: str) -> int:
    """How deep parentheses are nested. Escaped ones are left out, those in character sets are not."""
    depth = deepest = 0
    for char in re.sub(r"\\.", "", expression):
        depth += (char == "(") - (char == ")" and depth > 0)
        deepest = max(deepest, depth)
    return deepest
