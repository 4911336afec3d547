"""Throughput on this CPU, beside PEFT and transformers, in one process and in alternation. Reports ratios.

    python -m bench.cpu [--model PATH] [--rounds N] [--json PATH]

32 requests over 8 adapters, 32 tokens in and 32 out, prefill included, everything loaded and warm. Every round runs all
modes once, so that whatever else the machine does hits all of them; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from bench.peft_peer import PeftPeer, TokenIds, load_model, save_random_adapter
from interleaf import LLM, SamplingParams

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BASE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of both sides."""

    rank: int
    targets: str
    requests: int = 32
    adapters: int = 8
    prompt_tokens: int = 32
    output_tokens: int = 32

    def prompts(self, vocab_size: int) -> TokenIds:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, vocab_size, (self.requests, self.prompt_tokens), generator=generator).tolist()

    def names(self) -> list[str]:
        """The adapter of each request; each adapter's requests are neighbours, as PEFT's batches want them."""
        each = self.requests // self.adapters
        return [f"adapter-{i // each}" for i in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster Interleaf was than a peer: the median over the rounds, and the least and greatest."""

    what: str
    median: float
    least: float
    greatest: float


class InterleafSide:
    """The engine under test, as any user calls it."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        self.llm = LLM(str(model), adapters={n: str(p) for n, p in adapters.items()}, dtype="float32")

    def run(self, prompts: TokenIds, names: list[str] | None, num_tokens: int) -> TokenIds:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(prompts, params, adapter=names)]


def measure(
    modes: dict[str, Callable[[], TokenIds]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, TokenIds]]:
    """Seconds of every mode in every round, after one warm-up round; and what each mode answered."""
    answers = {name: mode() for name, mode in modes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(rounds):
        order = list(modes) if turn % 2 == 0 else list(reversed(modes))
        for name in order:
            start = time.perf_counter()
            modes[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds, answers


def ratio(what: str, ours: list[float], theirs: list[float]) -> Ratio:
    """Compared within each round, then summed up over the rounds."""
    quotients = [b / a for a, b in zip(ours, theirs, strict=True)]
    return Ratio(what, statistics.median(quotients), min(quotients), max(quotients))


def run(model_path: Path, work: Workload, rounds: int, scratch: Path) -> dict[str, object]:
    """Everything there is to report, ready for JSON."""
    targets = work.targets if work.targets == "all-linear" else work.targets.split(",")
    model = load_model(model_path)
    adapters = {
        f"adapter-{i}": save_random_adapter(model, scratch / str(i), rank=work.rank, targets=targets, seed=i)
        for i in range(work.adapters)
    }
    prompts, names = work.prompts(model.config.vocab_size), work.names()
    few, n = prompts[:BASE_BATCH], work.output_tokens
    peer, ours = PeftPeer(model, adapters), InterleafSide(model_path, adapters)
    seconds, answers = measure(
        {
            "interleaf, mixed batch": lambda: ours.run(prompts, names, n),
            "peft, switching": lambda: peer.switching(prompts, names, n),
            "peft, mixed batch": lambda: peer.mixed(prompts, names, n),
            "interleaf, base only": lambda: ours.run(few, None, n),
            "transformers, base only": lambda: peer.base(few, n),
        },
        rounds,
    )
    ours.llm.close()
    tokens = {name: (len(few) if "base" in name else len(prompts)) * n for name in seconds}
    mine, base = seconds["interleaf, mixed batch"], seconds["interleaf, base only"]
    same = {
        "switching": ("interleaf, mixed batch", "peft, switching"),
        "base": ("interleaf, base only", "transformers, base only"),
    }
    return {
        "workload": asdict(work),
        "machine": {
            "threads": torch.get_num_threads(),
            "cpus": len(os.sched_getaffinity(0)),
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": seconds,
        "tokens_per_second": {name: tokens[name] / statistics.median(s) for name, s in seconds.items()},
        "ratios": [
            asdict(ratio("PEFT switching adapters", mine, seconds["peft, switching"])),
            asdict(ratio("PEFT's mixed batch", mine, seconds["peft, mixed batch"])),
            asdict(ratio("transformers, base only", base, seconds["transformers, base only"])),
        ],
        "equal_answers": {
            what: f"{sum(x == y for x, y in zip(answers[a], answers[b], strict=True))} of {len(answers[a])}"
            for what, (a, b) in same.items()
        },
    }


def render(report: dict[str, object]) -> str:
    """The report as a table for people."""
    lines = [f"{'':28}{'tok/s':>8}   seconds by round"]
    for name, rate in report["tokens_per_second"].items():  # type: ignore[attr-defined]
        rounds = " ".join(f"{s:.2f}" for s in report["seconds"][name])  # type: ignore[index]
        lines.append(f"{name:28}{rate:8.1f}   {rounds}")
    lines.append("")
    for r in report["ratios"]:  # type: ignore[attr-defined]
        lines.append(f"Interleaf / {r['what']:26} {r['median']:5.2f}   ({r['least']:.2f} to {r['greatest']:.2f})")
    for what, equal in report["equal_answers"].items():  # type: ignore[attr-defined]
        lines.append(f"answers equal to the peer's, {what}: {equal}")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(os.environ.get("INTERLEAF_TEST_GGUF") or DEFAULT_MODEL))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="all-linear", help='"all-linear" or modules such as q_proj,v_proj')
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there, too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        report = run(args.model, Workload(rank=args.rank, targets=args.targets), args.rounds, Path(scratch))
    print(render(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
