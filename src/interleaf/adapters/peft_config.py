"""Reads adapter_config.json: which fields mean something here, which are refused by name. Knows no tensor, no model.

PEFT ignores what it does not know and merely warns of much of the rest; here a field either has its effect, or is known
to have none once training is over, or is refused. Facts about the fields: PEFT 0.21 (src/peft/tuners/lora/config.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from interleaf.adapters.json_file import Unreadable, read_object
from interleaf.adapters.problems import Problems, shown

CONFIG_NAME = "adapter_config.json"

_T = TypeVar("_T")

_MAX_CONFIG_BYTES = 4 * 2**20

_SUPPORTED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
}
_INERT = {
    # Where the adapter came from and how it was trained.
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "runtime_config"),
    # Read only together with a field that is refused: megatron_config, use_qalora, or init_lora_weights of that kind.
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # Concerns embeddings, and adapters of embeddings are refused.
    "ensure_weight_tying",
}
_REFUSED = {
    "use_dora": "weight-decomposed LoRA (DoRA) also rescales the base weights",
    "lora_bias": "a bias beside B would have to be added too",
    "fan_in_fan_out": "it means weights stored as [in, out], and this model's are [out, in]",
    "modules_to_save": "whole modules saved beside the adapter would have to replace the model's",
    "trainable_token_indices": "retrained token embeddings would have to replace the model's",
    "target_parameters": "LoRA on bare parameters is not LoRA on linear layers",
    "layer_replication": "it changes the model's layers",
    "megatron_config": "Megatron's parallel layers are stored differently",
    "alora_invocation_tokens": "activated LoRA (aLoRA) applies to a part of the prompt only",
    "use_qalora": "QALoRA pools its inputs",
    "use_bdlora": "block-diagonal LoRA stores A and B differently",
    "arrow_config": "Arrow mixes several adapters",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "Monte Carlo LoRA draws its weights",
    "velora_config": "VeLoRA is not known to leave plain LoRA behind",
}
_PLAIN_INITS = ("gaussian", "orthogonal")
"""Initialisations, beside true and false, that leave the base weights as they are.

PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base weights before training, so the adapter fits that changed base
only (converted on saving, PEFT writes true instead). Every other kind is refused as unknown.
"""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The meaning-bearing part of a config.

    None in a field marked (*) says that it, or another one that it is read together with, was refused: what depends on
    it cannot be judged.

    Attributes:
        r, lora_alpha: (*) rank and alpha where no pattern matches.
        rank_pattern, alpha_pattern: regular expressions and their values, in the file's order: the first match counts.
        target_modules: (*) a regular expression, "all-linear", or names and suffixes of modules.
        exclude_modules: likewise, without "all-linear"; None excludes nothing.
        layers_to_transform: layers that a list of targets is confined to; None is all.
        layers_pattern: regular expressions for the name of the list of layers; empty means any.
    """

    r: int | None
    lora_alpha: float | None
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]


def read_config(folder: Path, problems: Problems) -> PeftConfig | None:
    """The config of a PEFT folder; None if there is nothing that could be read. Missing fields take PEFT's defaults."""
    try:
        raw = read_object(folder / CONFIG_NAME, _MAX_CONFIG_BYTES)
    except Unreadable as error:
        problems.add(str(error))
        return None
    if raw.get("peft_type") != "LORA":
        problems.add(f'peft_type must be "LORA", got {shown(raw.get("peft_type"))}')
    for name, value in raw.items():
        if name in _REFUSED and not _is_unset(value):
            problems.add(f"{name}={shown(value)} is not supported: {_REFUSED[name]}")
        elif name not in _SUPPORTED | _INERT | _REFUSED.keys() and not _is_unset(value):
            problems.add(
                f"unknown config field {shown(name)} is set to {shown(value)}; it may change what the adapter does"
            )
    if not _is_unset(raw.get("bias")) and raw["bias"] != "none":
        problems.add(f"bias={shown(raw['bias'])} is not supported: trained biases would have to replace the model's")
    init = raw.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or init in _PLAIN_INITS):
        problems.add(
            f"init_lora_weights={shown(init)} is not supported: the adapter may fit a changed base; save it converted"
        )
    return _Fields(raw, problems).config()


class _Fields:
    """Checks the types of the supported fields."""

    def __init__(self, raw: dict[str, Any], problems: Problems) -> None:
        self._raw = raw
        self._problems = problems
        self._refused: set[str] = set()

    def config(self) -> PeftConfig:
        r, rank_pattern = self._rank("r", self._raw.get("r", 8)), self._pattern("rank_pattern", self._rank)
        alpha = self._alpha("lora_alpha", self._raw.get("lora_alpha", 8))
        alpha_pattern = self._pattern("alpha_pattern", self._alpha)
        targets, excluded = self._targets(), self._names("exclude_modules")
        layers, layers_pattern = self._layers(), self._layers_pattern()
        self._check_layers_against(targets)
        selection_is_sound = self._is_sound(
            "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"
        )
        return PeftConfig(
            r=r if self._is_sound("r", "rank_pattern") else None,
            lora_alpha=alpha if self._is_sound("lora_alpha", "alpha_pattern") else None,
            use_rslora=self._flag("use_rslora"),
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            target_modules=targets if selection_is_sound else None,
            exclude_modules=excluded,
            layers_to_transform=layers,
            layers_pattern=layers_pattern,
        )

    def _is_sound(self, *names: str) -> bool:
        return self._refused.isdisjoint(names)

    def _check_layers_against(self, targets: str | tuple[str, ...] | None) -> None:
        """PEFT cannot be given a selection of layers beside a regular expression, nor a pattern without layers."""
        by_layer = [n for n in ("layers_to_transform", "layers_pattern") if not _is_unset(self._raw.get(n))]
        if by_layer and isinstance(targets, str):
            self._refuse("target_modules", f"a list where {by_layer[0]} is set", targets)
        elif by_layer == ["layers_pattern"]:
            self._refuse("layers_pattern", "unset where layers_to_transform is not set", self._raw["layers_pattern"])

    def _refuse(self, name: str, must: str, value: object) -> None:
        self._refused.add(name.partition("[")[0])
        self._problems.add(f"{name} must be {must}, got {shown(value)}")

    def _flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse(name, "true or false", value)
        return False

    def _rank(self, name: str, value: object) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._refuse(name, "a whole number >= 1", value)
        return None

    def _alpha(self, name: str, value: object) -> float | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                alpha = float(value)
            except OverflowError:  # a whole number beyond the largest float
                alpha = math.inf
            if math.isfinite(alpha):
                return alpha
        self._refuse(name, "a finite number", value)
        return None

    def _pattern(self, name: str, check: Callable[[str, object], _T | None]) -> tuple[tuple[str, _T], ...]:
        value = self._raw.get(name)
        if _is_unset(value):
            return ()
        if not isinstance(value, dict):
            self._refuse(name, "an object of patterns and numbers", value)
            return ()
        checked = ((key, check(f"{name}[{shown(key)}]", item)) for key, item in value.items())
        return tuple((key, item) for key, item in checked if item is not None)

    def _targets(self) -> str | tuple[str, ...] | None:
        value = self._raw.get("target_modules")
        if _is_unset(value):
            self._problems.add(
                f"target_modules={shown(value)} is not supported: PEFT would take its own defaults for the model's "
                "family; name the modules"
            )
            return None
        return self._names("target_modules")

    def _names(self, name: str) -> str | tuple[str, ...] | None:
        value = self._raw.get(name)
        if _is_unset(value):
            return None
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(value)
        self._refuse(name, "a list of names or a string", value)
        return None

    def _layers(self) -> frozenset[int] | None:
        name = "layers_to_transform"
        value = self._raw.get(name)
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers):
            return frozenset(layers)
        self._refuse(name, "a layer's number or a list of them", value)
        return None

    def _layers_pattern(self) -> tuple[str, ...]:
        names = self._names("layers_pattern")
        return (names,) if isinstance(names, str) else names or ()


def _is_unset(value: object) -> bool:
    """Whether a value says "not used". 0 is not among them: it may be an index or a factor."""
    return value is None or value is False or value == "" or value == [] or value == {}
