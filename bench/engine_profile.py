"""Where the device's time goes in a decode step and in a mixed one, by groups of kernels. For GPUs only.

Every launch is annotated with its step on the host's timeline. A kernel belongs to the step that launched it, however
much later it ran: the trace ties each kernel to its launch, and those of a graph to the graph's.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.engine_rows import adapter_set, random_prompts
from bench.engine_setup import BenchEngine
from interleaf.core import SamplingParams, StepPlan
from interleaf.errors import ConfigError

_GROUPS = (  # the first that matches
    ("lora shrink", r"^_?shrink"),
    ("lora expand", r"^_?expand"),
    ("records, page lists", r"^(resolve|page_lists)$"),
    ("sampling", r"^(best_parts|weigh|gather|choose|penalise)$|sampl|argmax|top_?k|top_?p|multinomial|philox|softmax"),
    ("rotary + append", r"rotary|rotate_append|rope_angles|append"),
    ("attention", r"^(decode|merge|chunks)$|prefill|batchdecode|attention|attn|flash_|merge_?states|sdpa|fmha"),
    ("norm", r"norm"),
    ("activation", r"swiglu|silu|act_and_mul"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|cublas|splitk|matmul|wgmma|xmma"),
    ("copies", r"memcpy|memset|copy"),
    ("gathers, other elementwise", r"gather|scatter|index|embedding|elementwise|arange|fill|cat"),
)
_FIRST_OF_LAYER = "rotary + append"
_STEP = "bench step "
_SETTLE_TURNS = 40
"""Steps until those to be profiled: what steps like them lacked has been captured by then."""
_TURNS_BETWEEN = 6
_MIXED_TIMES = 3
"""A mixed step is met so often: the last one replays what the first ones had captured, if steps like it do."""
_PATIENCE_TURNS = 400
_LISTED = 12


def group_of(kernel: str) -> str:
    """The group of a kernel's name."""
    return next((name for name, pattern in _GROUPS if re.search(pattern, kernel, re.IGNORECASE)), "other")


@dataclass(slots=True)
class StepProfile:
    """What the device did for one step.

    Attributes:
        us: microseconds by kernel name.   launches: kernels by name.
        spans, names, streams: begin and end of each kernel, what it is, and where it ran.
        begin_us: of its first kernel on the stream that computes, that of most. What others run (uploads) may begin
            while the step before computes.
        busy_us: from there on, during which at least one kernel or copy of the step ran.
        host_us: that the launch took.
    """

    label: str
    host_us: float
    us: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    spans: list[tuple[float, float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    @property
    def begin_us(self) -> float:
        computes = statistics.mode(self.streams)
        return min(begin for (begin, _), stream in zip(self.spans, self.streams, strict=True) if stream == computes)

    @property
    def busy_us(self) -> float:
        busy, reached = 0.0, self.begin_us
        for begin, end in sorted(self.spans):
            busy += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return busy


def read_steps(events: Iterable[Mapping[str, Any]]) -> list[StepProfile]:
    """The annotated steps of a Chrome trace, in order, each with the kernels that it launched."""
    steps: list[tuple[float, float, StepProfile]] = []
    launched_at: dict[int, float] = {}
    kernels: list[Mapping[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and str(event.get("name")).startswith(_STEP):
            label = event["name"].removeprefix(_STEP)
            steps.append((event["ts"], event["ts"] + event["dur"], StepProfile(label, float(event["dur"]))))
        elif category in ("cuda_runtime", "cuda_driver"):
            launched_at[event["args"].get("correlation", -1)] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    steps.sort(key=lambda step: step[0])
    begins = [begin for begin, _, _ in steps]
    for kernel in kernels:
        at = launched_at.get(kernel["args"].get("correlation", -1))
        place = bisect_right(begins, at) - 1 if at is not None else -1
        if place < 0 or at is None or at > steps[place][1]:
            continue
        step = steps[place][2]
        step.us[kernel["name"]] += kernel["dur"]
        step.launches[kernel["name"]] += 1
        step.spans.append((kernel["ts"], kernel["ts"] + kernel["dur"]))
        step.names.append(kernel["name"])
        step.streams.append(kernel["args"].get("stream", 0))
    return [step for _, _, step in steps if step.spans]


def layer_of(steps: Sequence[StepProfile]) -> list[tuple[str, float, float]]:
    """A layer's kernels in the order in which they begin: name, begin and end, microseconds from the first one's begin.

    Means over all layers between two of the kernel that begins a layer (rotation) that have the same kernels as most.
    """
    layers: dict[tuple[str, ...], list[list[tuple[float, float]]]] = defaultdict(list)
    for step in steps:
        kernels = sorted(zip(step.spans, step.names, strict=True))
        firsts = [i for i, (_, name) in enumerate(kernels) if group_of(name) == _FIRST_OF_LAYER]
        for first, after in pairwise(firsts):
            began = kernels[first][0][0]
            spans = [(begin - began, end - began) for (begin, end), _ in kernels[first : after + 1]]
            layers[tuple(name for _, name in kernels[first : after + 1])].append(spans)
    if not layers:
        return []
    names, found = max(layers.items(), key=lambda item: len(item[1]))
    return [
        (name, statistics.mean(begin for begin, _ in spans), statistics.mean(end for _, end in spans))
        for name, spans in zip(names, zip(*found, strict=True), strict=True)
    ]


def summarise(steps: Sequence[StepProfile], period_us: float) -> dict[str, Any]:
    """Mean microseconds of a step by group, and its longest kernels; `idle` is what is left of a period."""
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    by_name: Counter[str] = Counter()
    for step in steps:
        by_name.update(step.us)
        for name, spent in step.us.items():
            us[group_of(name)] += spent / len(steps)
            launches[group_of(name)] += step.launches[name] / len(steps)
    return {
        "steps": len(steps),
        "period_us": period_us,
        "idle_us": period_us - statistics.mean(step.busy_us for step in steps),
        "host_us": statistics.mean(step.host_us for step in steps),
        "groups": {name: {"us": us[name], "kernels": launches[name]} for name in sorted(us, key=lambda n: -us[n])},
        "longest": {name: spent / len(steps) for name, spent in by_name.most_common(_LISTED)},
        "layer": layer_of(steps),
    }


def table(title: str, profile: Mapping[str, Any]) -> str:
    """A summary as Markdown."""
    period = profile["period_us"]
    lines = [f"| {title} | us | share | kernels |", "|---|---|---|---|"]
    for name, group in profile["groups"].items():
        lines.append(f"| {name} | {group['us']:.0f} | {group['us'] / period:.1%} | {group['kernels']:.0f} |")
    lines.append(f"| idle | {profile['idle_us']:.0f} | {profile['idle_us'] / period:.1%} | |")
    lines.append(
        f"| **a step** ({profile['steps']} of them; launching one {profile['host_us']:.0f}) | {period:.0f} | | |"
    )
    lines.append("")
    lines += [f"{spent:9.1f} us  [{group_of(name)}] {name[:140]}" for name, spent in profile["longest"].items()]
    lines += ["", "a layer: begin, end (us); the last line is the next one's first"]
    lines += [f"{begin:8.1f} {end:8.1f}  [{group_of(name)}] {name[:100]}" for name, begin, end in profile["layer"]]
    return "\n".join(lines)


def profile(
    engine: BenchEngine,
    set_name: str,
    count: int,
    rows: int,
    context_tokens: int,
    mixed: tuple[int, int],
    num_steps: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Profile decode steps of `rows` sequences over `count` adapters (0: the base model), and a mixed step.

    Args: mixed: prompts that come while the sequences decode, and tokens of each.
    Returns: a summary of each kind of step; of none where there is no GPU.
    Raises: ConfigError: the set of adapters is empty, or too few sequences may run at a time.
    """
    adapters = adapter_set(set_name)
    if count and adapters is None:
        raise ConfigError("--profile needs adapters, unless --profile-adapters is 0")
    if rows >= engine.parts.config.max_num_seqs:
        raise ConfigError(f"max_num_seqs={engine.parts.config.max_num_seqs} leaves no seat beside {rows} sequences")
    names: dict[int, str] = {}
    if count and adapters is not None:
        names = engine.register(engine.lay_out(adapters, range(count)))
    client, vocab = engine.client, engine.parts.spec.vocab_size
    output = engine.parts.max_model_len - context_tokens
    num_prompts, mixed_tokens = mixed[0], min(mixed[1], engine.parts.max_model_len // 2)
    prompts = random_prompts([context_tokens] * rows + [mixed_tokens] * num_prompts * _MIXED_TIMES, vocab, seed=2)

    def submit(prompt: tuple[int, ...], position: int, tokens: int) -> str:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        return client.submit(prompt, params, names[position % count] if count else None)

    log = engine.recording.reset()
    open_ids = [submit(prompt, i, output) for i, prompt in enumerate(prompts[:rows])]
    _turn_until(engine, lambda: bool(log.plans) and len(log.plans[-1].decode) == rows, "all sequences decode")
    for _ in range(_SETTLE_TURNS):
        client.poll()
    with torch.profiler.profile() as profiler:
        engine.recording.annotate = _annotation
        for _ in range(num_steps + 1):
            client.poll()
        for begin in range(rows, len(prompts), num_prompts):
            open_ids += [submit(prompt, i, 2) for i, prompt in enumerate(prompts[begin : begin + num_prompts])]
            first = len(log.plans)
            _turn_until(engine, lambda n=first: any(p.chunks and p.decode for p in log.plans[n:]), "a mixed step")  # type: ignore[misc]
            for _ in range(_TURNS_BETWEEN):
                client.poll()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    engine.recording.annotate = None
    for id_ in open_ids:
        client.abort(id_)
    while client.has_work:
        client.poll()
    engine.clear_adapters()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        steps = read_steps(json.loads(path.read_text())["traceEvents"])
    result: dict[str, Any] = {"adapters": set_name, "distinct": count, "rows": rows, "context": context_tokens}
    for kind in ("decode", "mixed"):
        chosen, period_us = steps_of(steps, kind)
        if not chosen:
            say(f"the profile holds no {kind} step")
            continue
        result[kind] = summarise(chosen, period_us)
        title = f"{kind} {chosen[0].label.partition(' ')[2]}, D={count} {set_name if count else ''}"
        say("profile\n" + table(title, result[kind]))
    return result


def steps_of(steps: Sequence[StepProfile], kind: str) -> tuple[list[StepProfile], float]:
    """Steps of a kind, and the mean time from the begin of one to that of the next.

    Of "mixed" the last one; of others those that are followed by their like, with as many rows as the first of them.
    """
    pairs = [(a, b) for a, b in pairwise(steps) if a.label.startswith(kind)]
    if kind == "mixed":
        pairs = pairs[-1:]
    else:
        alike = [(a, b) for a, b in pairs if a.label == b.label]
        pairs = [(a, b) for a, b in alike if a.label == alike[0][0].label]
    if not pairs:
        return [], 0.0
    return [step for step, _ in pairs], statistics.mean(b.begin_us - a.begin_us for a, b in pairs)


def _annotation(plan: StepPlan) -> Any:
    kind = "mixed" if plan.chunks else "decode"
    return torch.profiler.record_function(f"{_STEP}{kind} T={plan.num_tokens}")


def _turn_until(engine: BenchEngine, reached: Callable[[], bool], what: str) -> None:
    for _ in range(_PATIENCE_TURNS):
        if reached():
            return
        engine.client.poll()
    raise RuntimeError(f"{what}: not reached in {_PATIENCE_TURNS} steps")
