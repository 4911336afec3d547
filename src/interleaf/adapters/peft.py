"""A PEFT folder as LoRA pairs of a model, whole and checked, or refused with every reason. Knows nothing of pages."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from interleaf.adapters.json_file import Unreadable
from interleaf.adapters.parsed import AdapterSummary, LoraPair, ModuleAt, ParsedAdapter, digest, largest
from interleaf.adapters.peft_config import PeftConfig, read_config
from interleaf.adapters.peft_files import open_weights
from interleaf.adapters.peft_keys import Half, parse_key, why_unsupported
from interleaf.adapters.peft_targets import PatternError, Targets, module_name
from interleaf.adapters.problems import Problems, shown
from interleaf.adapters.safetensors_file import TORCH_DTYPES, SafetensorsFile
from interleaf.core import ModelSpec, Module
from interleaf.errors import AdapterRejected

__all__ = ["AdapterSummary", "LoraPair", "ModuleAt", "ParsedAdapter", "parse_folder"]

_MAX_FLOAT = torch.finfo(torch.float32).max


def parse_folder(folder: Path, spec: ModelSpec) -> ParsedAdapter:
    """Read an adapter of `spec`'s model from a folder that PEFT wrote.

    The uid is a digest of the tensors (name, dtype, shape, bytes) and each module's scale, which is all that is left of
    the config's meaning: two spellings of one adapter have one uid.

    Raises: AdapterRejected: with every problem found.
    """
    problems = Problems()
    pairs: dict[ModuleAt, LoraPair] = {}
    if _is_folder(folder, problems):
        config = read_config(folder, problems)
        pairs = _Parser(spec, config, open_weights(folder, problems), problems).pairs()
    if problems:
        raise AdapterRejected(str(folder), list(problems))
    return ParsedAdapter(digest(pairs), pairs, str(folder))


def _is_folder(folder: Path, problems: Problems) -> bool:
    try:
        mode = folder.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.add(f"the folder cannot be opened: {reason}")
        return False
    if not stat.S_ISDIR(mode):
        problems.add("a folder is wanted, this is a file")
        return False
    return True


class _Parser:
    """One folder's tensors against one config and one model. Every step adds to `problems` and goes on."""

    def __init__(
        self, spec: ModelSpec, config: PeftConfig | None, files: Mapping[str, SafetensorsFile], problems: Problems
    ) -> None:
        self._spec = spec
        self._config = config
        self._files = files
        self._problems = problems

    def pairs(self) -> dict[ModuleAt, LoraPair]:
        """The pairs; incomplete or empty if there are problems."""
        found, prefix = self._halves()
        for at in [at for at, halves in found.items() if len(halves) < 2]:
            (half,) = found[at]
            missing = Half.A if half is Half.B else Half.B
            self._problems.group(f"lora_{missing} is missing beside lora_{half}", _at(at))
        complete = [at for at, halves in found.items() if len(halves) == 2 and self._shapes_fit(at, halves)]
        ranks = {at: self._shape(found[at][Half.A])[0] for at in complete}
        scales: dict[ModuleAt, float] = {}
        if self._config is not None and found:
            try:
                scales = self._match(self._config, found.keys(), ranks, prefix)
            except PatternError as error:
                self._problems.add(str(error))
        return self._read({at: found[at] for at in complete}, scales)

    def _halves(self) -> tuple[dict[ModuleAt, dict[Half, str]], str]:
        """Names of the tensors by what they are, in the model's order; and the prefix that their modules share."""
        found: dict[ModuleAt, dict[Half, str]] = {}
        prefixes: dict[str, str] = {}
        for name in self._files:
            key = parse_key(name)
            if key is None:
                self._problems.group(why_unsupported(name), shown(name))
            elif key.layer >= self._spec.num_layers:
                layers = f"tensors are for layers that this model of {self._spec.num_layers} layers does not have"
                self._problems.group(layers, shown(name))
            else:
                prefixes.setdefault(key.prefix, name)
                self._claim(found.setdefault((key.layer, key.module), {}), key.half, name)
        if len(prefixes) > 1:
            self._problems.group_all("tensors are named after different models", map(shown, prefixes.values()))
        return dict(sorted(found.items())), next(iter(prefixes), "")

    def _claim(self, halves: dict[Half, str], half: Half, name: str) -> None:
        if half in halves:
            self._problems.add(f"{shown(halves[half])} and {shown(name)} are the same tensor twice")
        else:
            halves[half] = name

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def _shapes_fit(self, at: ModuleAt, halves: Mapping[Half, str]) -> bool:
        """Whether A is [rank, in] and B is [out, rank] for one rank >= 1, in a supported dtype."""
        inputs, outputs = self._spec.in_features(at[1]), self._spec.out_features(at[1])
        a, b = self._shape(halves[Half.A]), self._shape(halves[Half.B])
        fits = True
        if not (len(a) == 2 and a[0] >= 1 and a[1] == inputs):
            fits = False
            self._problems.group(f"lora_A of {at[1]} must be [rank, {inputs}], got {list(a)}", _at(at))
        if not (len(b) == 2 and b[1] >= 1 and b[0] == outputs):
            fits = False
            self._problems.group(f"lora_B of {at[1]} must be [{outputs}, rank], got {list(b)}", _at(at))
        if fits and a[0] != b[1]:
            fits = False
            self._problems.group(f"lora_A has rank {a[0]} and lora_B has rank {b[1]}", _at(at))
        for name in halves.values():
            dtype = self._files[name].entries[name].dtype
            if dtype not in TORCH_DTYPES:
                fits = False
                self._problems.group(f"dtype {dtype} is not supported, only {', '.join(TORCH_DTYPES)}", shown(name))
        return fits

    def _match(
        self, config: PeftConfig, found: Iterable[ModuleAt], ranks: Mapping[ModuleAt, int], prefix: str
    ) -> dict[ModuleAt, float]:
        """Hold the tensors against the config: targets both ways, ranks, scales. Returns the scales.

        Raises: PatternError
        """
        targets = Targets(config)
        for layer in sorted(config.layers_to_transform or ()):
            if layer >= self._spec.num_layers:
                self._problems.add(f"layers_to_transform names layer {layer}, the model has {self._spec.num_layers}")
        if config.target_modules is not None:
            self._check_targets(targets, set(found), prefix)
        if config.r is not None:
            for at, rank in ranks.items():
                allowed = targets.ranks(module_name(prefix, *at))
                if rank not in allowed:
                    what = f"the tensors have rank {rank} and the config says {' or '.join(map(str, allowed))}"
                    self._problems.group(what, _at(at))
        scales: dict[ModuleAt, float] = {}
        if config.lora_alpha is not None:
            for at, rank in ranks.items():
                alpha = targets.alpha(module_name(prefix, *at))
                scales[at] = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        return scales

    def _check_targets(self, targets: Targets, found: set[ModuleAt], prefix: str) -> None:
        everywhere = [(layer, module) for layer in range(self._spec.num_layers) for module in Module]
        wanted = {at for at in everywhere if targets.targeted(module_name(prefix, *at))}
        for name in ("lm_head", f"{prefix}embed_tokens"):
            if targets.targeted(name):
                self._problems.add(f"target_modules targets {name}: adapters of the vocabulary are not supported")
        if not wanted:
            self._problems.add("target_modules names no module of this model")
        untargeted = "there are tensors for modules that target_modules does not select"
        self._problems.group_all(untargeted, map(_at, sorted(found - wanted)))
        missing = "target_modules selects modules that there are no tensors for"
        self._problems.group_all(missing, map(_at, sorted(wanted - found)))

    def _read(
        self, found: Mapping[ModuleAt, Mapping[Half, str]], scales: Mapping[ModuleAt, float]
    ) -> dict[ModuleAt, LoraPair]:
        """Read the tensors and look for values that are not finite. Keeps them only while nothing is wrong."""
        pairs: dict[ModuleAt, LoraPair] = {}
        tensors, bound = self._read_files()
        # One look at everything mostly tells that all is well. Otherwise each tensor is asked.
        is_fine = bound * max(map(abs, scales.values()), default=1.0) <= _MAX_FLOAT and math.isfinite(bound)
        for at, halves in found.items():
            try:
                a, b = self._tensor(halves[Half.A], tensors), self._tensor(halves[Half.B], tensors)
            except Unreadable as error:
                self._problems.add(str(error))
                continue
            scale = scales.get(at)
            bounds = (bound, bound) if is_fine else self._bounds(at, a, b, scale)
            if scale is not None and not self._problems:
                pairs[at] = LoraPair(a, b, scale, bounds)
        return pairs

    def _read_files(self) -> tuple[dict[str, torch.Tensor], float]:
        """Read whole files, while nothing is wrong: then all that is in them is wanted.

        Returns: the tensors, and a magnitude that none exceeds, or NaN. No tensors if something is wrong: what is
            refused may be large, and is read a tensor at a time.
        """
        if self._problems:
            return {}, math.nan
        tensors: dict[str, torch.Tensor] = {}
        bounds: list[float] = []
        for file in {file.path: file for file in self._files.values()}.values():
            read = file.read_all()
            if read is None:
                return {}, math.nan
            tensors |= read[0]
            bounds.append(read[1])
        return tensors, max(bounds, default=math.nan) if all(map(math.isfinite, bounds)) else math.nan

    def _tensor(self, name: str, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = read.get(name)
        return self._files[name].read(name) if tensor is None else tensor

    def _bounds(self, at: ModuleAt, a: torch.Tensor, b: torch.Tensor, scale: float | None) -> tuple[float, float]:
        """The largest magnitudes of a pair; says what is wrong with them."""
        bounds = largest(a), largest(b)
        for half, bound in zip(Half, bounds, strict=True):
            if not math.isfinite(bound):
                self._problems.group(f"lora_{half} holds NaN or infinite values", _at(at))
        if scale is not None and bounds[1] * abs(scale) > _MAX_FLOAT:
            self._problems.group(f"lora_B times the scale {scale:.3g} is beyond float32", _at(at))
        return bounds


def _at(at: ModuleAt) -> str:
    return f"layer {at[0]} {at[1]}"
