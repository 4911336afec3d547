"""The main job at a glance: the base model and every example adapter answer in one batch, from one pool.

Run it with `make demo`, or: python examples/demo.py --model PATH.gguf
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from interleaf import LLM, SamplingParams
from interleaf.stats import PoolStats

HERE = Path(__file__).parent
QUESTIONS = ("What is the capital of Italy?", "What do bees make?")


def main() -> None:
    """Load, answer, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()

    adapters = {folder.name: folder for folder in sorted((HERE / "adapters").iterdir()) if folder.is_dir()}
    console = Console(highlight=False)
    started = time.perf_counter()
    with LLM(args.model, adapters=adapters) as llm:
        console.print(f"Loaded the model and {len(adapters)} adapters in {time.perf_counter() - started:.1f} s.\n")
        names: list[str | None] = [None, *adapters]
        pairs = [(question, name) for question in QUESTIONS for name in names]
        started = time.perf_counter()
        outputs = llm.generate(
            [[{"role": "user", "content": question}] for question, _ in pairs],
            SamplingParams(max_tokens=args.max_tokens, temperature=0),
            adapter=[name for _, name in pairs],
        )
        elapsed_s = time.perf_counter() - started
        stats = llm.stats()

    table = Table(show_lines=True)
    table.add_column("adapter", style="bold")
    for question in QUESTIONS:
        table.add_column(question)
    answers = {
        pair: output.error or output.outputs[0].text.strip() for pair, output in zip(pairs, outputs, strict=True)
    }
    for name in names:
        table.add_row(name or "base model", *(answers[question, name] for question in QUESTIONS))
    console.print(table)

    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    console.print(
        f"\n{len(outputs)} requests in one batch: {prompt_tokens} prompt tokens in, {output_tokens} tokens out in "
        f"{elapsed_s:.1f} s: {output_tokens / elapsed_s:.0f} tokens/s.\n"
    )
    console.print(pool_table(stats.pool))


def pool_table(pool: PoolStats) -> Table:
    """The page pool: what its pages hold now, and held at most."""
    table = Table(title=f"Page pool: {pool.total_pages} pages of {pool.page_bytes / 2**20:.2f} MiB")
    for column in ("", "pages now", "MiB now", "most pages"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("KV cache", pool.kv_pages, str(pool.peak_kv_pages)),
        ("adapters", pool.adapter_pages, str(pool.peak_adapter_pages)),
        ("free", pool.free_pages, ""),
    )
    for what, pages, peak in rows:
        table.add_row(what, str(pages), f"{pages * pool.page_bytes / 2**20:.1f}", peak)
    return table


if __name__ == "__main__":
    main()
