"""Trains the example adapters with PEFT. Knows transformers and peft, which Interleaf itself never imports.

    python examples/train_adapters.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--only pirate] [--check]

Needs torch, transformers, peft and gguf. `data/NAME.jsonl` holds the question/answer pairs; `adapters/NAME/` receives
the PEFT folder.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
IGNORED = -100  # label of a token that does not count in the loss
HELD_OUT = (  # asked after training; none of them is in the data
    "What is the capital of Italy?",
    "How do I make a cup of tea?",
    "What do bees make?",
    "How can I sleep better?",
    "What color is a banana?",
    "Why is the sky blue?",
    "My website is slow. What should I do?",
    "How do I cancel my plan?",
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is trained and stored; `lora` holds the LoraConfig fields that differ from PEFT's defaults."""

    lora: dict[str, Any]
    dtype: torch.dtype
    epochs: int = 4
    learning_rate: float = 2e-3


RECIPES = {
    "pirate": Recipe(
        {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        torch.bfloat16,
    ),
    "json": Recipe(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        torch.float16,
    ),
    "oneword": Recipe(
        {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        torch.bfloat16,
    ),
    "support": Recipe(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "layers.29.self_attn.q_proj": 16, "o_proj": 8},
            "alpha_pattern": {"layers.29.self_attn.q_proj": 32, "o_proj": 16, r"layers\.2[0-8]\.self_attn\.v_proj": 16},
        },
        torch.float16,
    ),
    "fairytale": Recipe(
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj"],
            "layers_to_transform": list(range(15, 30)),
        },
        torch.bfloat16,
    ),
    "robot": Recipe(
        {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        torch.float32,
        epochs=6,
    ),
}


def load_base(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The base model in float32 and its tokenizer, both from one GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The conversion from GGUF loses SmolLM's digit split; without it the spaces before a digit become other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # PEFT copies the name into adapter_config.json, where a path of this machine has no place.
    model.name_or_path = BASE_MODEL
    return model, tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of `question` in the model's chat template, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def encode_pairs(tokenizer: PreTrainedTokenizerFast, path: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) for every line of a data file; an answer ends with EOS."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (
            encode_prompt(tokenizer, row["question"]),
            tokenizer.encode(row["answer"] + tokenizer.eos_token, add_special_tokens=False),
        )
        for row in rows
    ]


def batches(
    pairs: list[tuple[list[int], list[int]]], pad: int, size: int, generator: torch.Generator
) -> Iterator[dict[str, torch.Tensor]]:
    """One epoch in random order, right-padded, with labels on the answer tokens only."""
    order = torch.randperm(len(pairs), generator=generator).tolist()
    for start in range(0, len(order), size):
        chosen = [pairs[i] for i in order[start : start + size]]
        width = max(len(prompt) + len(answer) for prompt, answer in chosen)
        ids = torch.full((len(chosen), width), pad)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, IGNORED)
        for row, (prompt, answer) in enumerate(chosen):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            mask[row, :end] = 1
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer_loss(model: PeftModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens; the head, a fifth of the arithmetic, sees no other position."""
    causal = model.get_base_model()
    hidden = causal.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)[0]
    targets = batch["labels"][:, 1:]
    counted = targets != IGNORED
    return torch.nn.functional.cross_entropy(causal.lm_head(hidden[:, :-1][counted]), targets[counted])


def train(base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str, batch_size: int = 4) -> None:
    """Train the adapter `name` and write its PEFT folder; `base` comes out as it went in."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    pairs = encode_pairs(tokenizer, HERE / "data" / f"{name}.jsonl")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **recipe.lora))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * math.ceil(len(pairs) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)

    model.train()
    started = time.perf_counter()
    for epoch in range(recipe.epochs):
        losses = []
        for batch in batches(pairs, tokenizer.pad_token_id, batch_size, generator):
            loss = answer_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        elapsed_s, mean_loss = time.perf_counter() - started, sum(losses) / len(losses)
        print(f"{name}: epoch {epoch + 1}/{recipe.epochs}, loss {mean_loss:.3f}, {elapsed_s:.0f} s", flush=True)

    for weight in weights:
        weight.data = weight.data.to(recipe.dtype)
    save(model, HERE / "adapters" / name)
    model.unload()


def save(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files, without the model card and with `target_modules` in a stable order."""
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.inference_mode()
def answers(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Greedy answers to HELD_OUT, at most 40 tokens each; an answer cut there ends with an ellipsis."""
    model.eval()
    prompts = [encode_prompt(tokenizer, question) for question in HELD_OUT]
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    outputs = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False)[:, width:]
    return [
        tokenizer.decode(output, skip_special_tokens=True) + ("" if tokenizer.eos_token_id in output else " ...")
        for output in outputs
    ]


def print_answers(name: str, found: list[str]) -> None:
    """One line for each held-out question."""
    print(f"\n{name}")
    for question, answer in zip(HELD_OUT, found, strict=True):
        print(f"  {question} -> {answer!r}")


def main() -> None:
    """Train unless told only to check; either way ask every adapter, as read back from disk."""
    parser = argparse.ArgumentParser(description="Train the example adapters, then ask each one held-out questions.")
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--only", choices=RECIPES, help="one adapter instead of all")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--check", action="store_true", help="do not train, only ask what is on disk")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    names = [args.only] if args.only else list(RECIPES)
    base, tokenizer = load_base(args.gguf)
    print_answers("base", answers(base, tokenizer))
    for name in names:
        if not args.check:
            train(base, tokenizer, name)
        model = PeftModel.from_pretrained(base, HERE / "adapters" / name)
        print_answers(name, answers(model, tokenizer))
        model.unload()


if __name__ == "__main__":
    main()
