"""Adapters made by PEFT itself, by seed, over every field that Interleaf serves. Knows nothing of Interleaf."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + MLP


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter.

    Attributes:
        config: arguments of LoraConfig.
        dtype: of the tensors in the file.
        strength: Frobenius norm of the weight change s * B @ A, as a share of the weight's own, in every module.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    strength: float = 0.15


def recipes(num_layers: int) -> dict[str, Recipe]:
    """Adapters that together use every supported field of a LoraConfig, on a model of that many layers."""
    last, half = num_layers - 1, num_layers // 2
    made = {f"only-{name}": Recipe({"r": 8, "target_modules": [name]}, strength=0.4) for name in ALL}
    made |= {f"rank-{r}": Recipe({"r": r, "lora_alpha": 2 * r, "target_modules": list(ALL)}) for r in (1, 3, 6, 16)}
    made["rank-64"] = Recipe({"r": 64, "lora_alpha": 16, "target_modules": list(ALL)}, torch.float16)
    made["alpha-below-rank"] = Recipe({"r": 16, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}, strength=0.4)
    made["rslora"] = Recipe({"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": list(ATTENTION)})
    made["rank-pattern"] = Recipe(
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": list(ALL),
            "rank_pattern": {"k_proj": 3, rf"layers\.{last}\.mlp\.down_proj": 16, "layers.0.self_attn.q_proj": 1},
        }
    )
    made["alpha-pattern"] = Recipe(
        {
            "r": 6,
            "lora_alpha": 6,
            "target_modules": list(ATTENTION),
            "alpha_pattern": {"v_proj": 24, r"layers\.0\.self_attn\.o_proj": 1.5},
        },
        strength=0.3,
    )
    made["patterns-rslora"] = Recipe(
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "o_proj", "up_proj"],
            "rank_pattern": {"o_proj": 10},
            "alpha_pattern": {"o_proj": 5, "up_proj": 32},
        },
        torch.bfloat16,
        strength=0.3,
    )
    made["regex"] = Recipe(
        {"r": 8, "target_modules": rf".*layers\.({half}|{last})\.(self_attn\.(q|v)_proj|mlp\.down_proj)"}, strength=1.0
    )
    made["suffixes"] = Recipe(
        {"r": 8, "target_modules": ["self_attn.o_proj", f"layers.{half}.mlp.gate_proj", "up_proj"]}, torch.float16
    )
    made["all-linear"] = Recipe({"r": 8, "lora_alpha": 32, "target_modules": "all-linear"})
    made["all-linear-but-list"] = Recipe(
        {"r": 8, "target_modules": "all-linear", "exclude_modules": ["k_proj", f"layers.{last}.mlp.down_proj"]}
    )
    made["list-but-regex"] = Recipe(
        {"r": 8, "target_modules": list(ALL), "exclude_modules": r".*layers\.0\..*|.*\.mlp\.up_proj"}, torch.bfloat16
    )
    made["some-layers"] = Recipe(
        {"r": 8, "target_modules": list(ALL), "layers_to_transform": list(range(half, num_layers))}, strength=0.2
    )
    made["one-layer"] = Recipe({"r": 16, "target_modules": list(ALL), "layers_to_transform": half}, strength=1.0)
    made["float16"] = Recipe({"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}, torch.float16, 0.3)
    made["bfloat16"] = Recipe({"r": 8, "target_modules": ["k_proj", "o_proj", "gate_proj"]}, torch.bfloat16, 0.3)
    return made


def save_adapter(model: PreTrainedModel, recipe: Recipe, folder: Path, seed: int) -> Path:
    """Have PEFT make an adapter of that recipe for `model` and save it; the model itself comes back unchanged.

    A is PEFT's own initialisation, B is normal and scaled for `recipe.strength`, so that leaving out or getting wrong
    any scale or any module changes what the adapter says.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on configurations is not what is tested
        peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **recipe.config))
    for module in peft_model.modules():
        if isinstance(module, LoraLayer):
            _randomise(module, recipe)
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    peft_model.unload()
    _restore_spelling(folder, recipe)
    return folder


@torch.no_grad()
def _randomise(module: LoraLayer, recipe: Recipe) -> None:
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    b.normal_()
    change = ((b.T @ b) * (a @ a.T)).sum().sqrt() * module.scaling["default"]  # |s B A|: the product itself is large
    b *= recipe.strength * module.get_base_layer().weight.norm() / change
    a.data, b.data = a.data.to(recipe.dtype), b.data.to(recipe.dtype)


def _restore_spelling(folder: Path, recipe: Recipe) -> None:
    """PEFT expands "all-linear" before it saves; files on the hub hold either spelling, so put the original back."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"] = recipe.config["target_modules"]
    path.write_text(json.dumps(config, indent=2))


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the adapter of a folder, for inference; `unload()` takes it off again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder).eval()
