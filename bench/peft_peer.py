"""The peers of the CPU benchmark: transformers' and PEFT's own `generate`, tuned in good faith. Knows no Interleaf.

What "good faith" means here: float32 like the other side, the same threads, inference mode, the KV cache on, SDPA
attention, no padding (all prompts have one length), no logits processor (the length is forced by having no end token),
adapters loaded before the clock starts, and a warm-up of every mode.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, PreTrainedModel

TokenIds = list[list[int]]


def load_model(path: Path) -> PreTrainedModel:
    """A Hugging Face folder or a GGUF file, in float32."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def save_random_adapter(
    model: PreTrainedModel, folder: Path, *, rank: int, targets: str | list[str], seed: int
) -> Path:
    """Save a PEFT folder with an adapter for `model`, A and B nonzero; both sides of the benchmark load it."""
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=targets)
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for module in peft_model.modules():
            if isinstance(module, LoraLayer):
                module.lora_B["default"].weight.normal_(std=0.05)
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    peft_model.unload()
    return folder


class PeftPeer:
    """One base model with adapters loaded by PEFT, and the same weights without PEFT's layers around them."""

    def __init__(self, model: PreTrainedModel, adapters: dict[str, Path]) -> None:
        model.generation_config.eos_token_id = None
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._bare = copy.deepcopy(model, {id(t): t for t in tensors})  # the tensors themselves are shared
        names = list(adapters)
        self._peft = PeftModel.from_pretrained(model, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self._peft.load_adapter(adapters[name], adapter_name=name)
        self._peft.eval()

    def base(self, prompts: TokenIds, num_tokens: int) -> TokenIds:
        """transformers' generate, all prompts in one batch."""
        return _generate(self._bare, prompts, num_tokens)

    def switching(self, prompts: TokenIds, names: Sequence[str], num_tokens: int) -> TokenIds:
        """One batch per adapter, one after the other; answers in the order of the prompts."""
        answers: TokenIds = [[] for _ in prompts]
        for name in dict.fromkeys(names):
            mine = [i for i, other in enumerate(names) if other == name]
            self._peft.set_adapter(name)
            for i, answer in zip(mine, _generate(self._peft, [prompts[i] for i in mine], num_tokens), strict=True):
                answers[i] = answer
        return answers

    def mixed(self, prompts: TokenIds, names: Sequence[str], num_tokens: int) -> TokenIds:
        """All prompts in one batch, each row with its own adapter."""
        return _generate(self._peft, prompts, num_tokens, adapter_names=list(names))


@torch.inference_mode()
def _generate(model: PreTrainedModel | PeftModel, prompts: TokenIds, num_tokens: int, **options: list[str]) -> TokenIds:
    ids = torch.tensor(prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            **options,
        )
    answers = out[:, ids.shape[1] :]
    if answers.shape != (len(prompts), num_tokens):
        raise RuntimeError(f"the peer made {tuple(answers.shape)} tokens, not {(len(prompts), num_tokens)}")
    return answers.tolist()
