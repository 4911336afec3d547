"""What is read from a PEFT folder equals what PEFT itself makes of it: the same modules, scales and weight changes."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from interleaf.adapters.peft import parse_folder
from interleaf.adapters.peft_config import PeftConfig
from interleaf.adapters.peft_targets import Targets
from interleaf.core import ModelSpec, Module
from tests.support.peft_adapters import load_adapter, recipes, save_adapter
from tests.support.peft_folders import MODEL, NUM_LAYERS, module_of
from tests.support.tiny_models import make_model

RECIPES = recipes(NUM_LAYERS)


@pytest.fixture(scope="module")
def model():
    return make_model("llama3")


def peft_layers(peft_model: torch.nn.Module) -> dict[tuple[int, str], LoraLayer]:
    """PEFT's LoRA layers by (layer, module)."""
    found = {}
    for name, layer in peft_model.named_modules():
        if isinstance(layer, LoraLayer):
            parts = name.split(".")
            found[int(parts[parts.index("layers") + 1]), parts[-1]] = layer
    return found


def test_the_hand_written_folders_are_for_the_tiny_model(model):
    spec, config = ModelSpec(**MODEL), model.config
    for module in Module:
        linear = model.get_submodule(module_of(0, module))
        assert (linear.in_features, linear.out_features) == (spec.in_features(module), spec.out_features(module))
    assert config.num_hidden_layers == spec.num_layers


@pytest.mark.parametrize("name", RECIPES)
def test_modules_scales_and_weight_changes_are_pefts(model, name, tmp_path: Path):
    folder = save_adapter(model, RECIPES[name], tmp_path, seed=11)
    parsed = parse_folder(folder, ModelSpec(**MODEL))
    peft_model = load_adapter(model, folder)
    try:
        theirs = peft_layers(peft_model)
        assert {(l, str(m)) for l, m in parsed.pairs} == set(theirs)
        for (layer, module), pair in parsed.pairs.items():
            lora = theirs[layer, str(module)]
            assert pair.scale == lora.scaling["default"]
            assert pair.rank == lora.r["default"]
            assert pair.a.dtype == RECIPES[name].dtype
            mine = pair.scale * (pair.b.float() @ pair.a.float())
            # The scale, and for 16-bit files the place where PEFT rounds, are applied in another order.
            torch.testing.assert_close(mine, lora.get_delta_weight("default").float(), rtol=1e-4, atol=1e-5)
    finally:
        peft_model.unload()


NAMES = [module_of(layer, module) for layer in (0, 1, 2, 11) for module in Module] + [
    *("lm_head", "model.embed_tokens", "layers.1.self_attn.q_proj", "model.blocks.1.mlp.up_proj", "q_proj"),
    "model.language_model.layers.1.self_attn.q_proj",
]
SELECTIONS = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["proj", "_proj", "attn.q_proj", "self_attn.q_proj", "1.self_attn.k_proj"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "up_proj"], "layers_to_transform": [0]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 11], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "lay.rs"]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "(b|l)(l|a).*?s"},
    {"target_modules": "q_proj"},
    {"target_modules": r".*\.1\..*"},
    {"target_modules": r".*(q|up)_proj|lm_head"},
    {"target_modules": r"model\.layers\.1"},
    {"target_modules": r"model\.layers\.\d\.mlp\..*|.*k_proj"},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["1.self_attn.q_proj", "proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.1"},
    {"target_modules": r".*_proj", "exclude_modules": r".*\.1?1\..*|.*up_proj"},
]


def config_of(**fields) -> PeftConfig:
    layers = fields.get("layers_to_transform")
    patterns = fields.get("layers_pattern", ())
    names = {
        key: value if isinstance(value, str) or value is None else tuple(value)
        for key, value in ((key, fields.get(key)) for key in ("target_modules", "exclude_modules"))
    }
    return PeftConfig(
        r=8,
        lora_alpha=8.0,
        use_rslora=False,
        rank_pattern=(),
        alpha_pattern=tuple(fields.get("alpha_pattern", {}).items()),
        **names,
        layers_to_transform=None if layers is None else frozenset([layers] if isinstance(layers, int) else layers),
        layers_pattern=(patterns,) if isinstance(patterns, str) else tuple(patterns),
    )


@pytest.mark.parametrize("fields", SELECTIONS, ids=str)
def test_modules_are_selected_as_peft_selects_them(fields):
    mine, theirs = Targets(config_of(**fields)), LoraConfig(**fields)
    selected = [name for name in NAMES if mine.targeted(name)]
    assert selected == [name for name in NAMES if check_target_module_exists(theirs, name)]


PATTERNS = ["q_proj", "proj", r"layers\.1\..*", "^model.layers.1.self_attn.q_proj", "1.self_attn.(q|k)_proj", "(up|.*)"]


@pytest.mark.parametrize("first", PATTERNS)
@pytest.mark.parametrize("second", PATTERNS)
def test_patterns_match_as_pefts_do(first, second):
    pattern = {first: 2.0, second: 3.0}
    targets = Targets(config_of(target_modules=["q_proj"], alpha_pattern=pattern))
    for name in NAMES:
        assert targets.alpha(name) == pattern.get(get_pattern_key(pattern.keys(), name), 8.0)
