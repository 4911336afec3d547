"""What a cold adapter costs the first token of a request, at low load. Compares it with its own second request."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from bench.engine_rows import adapter_set, random_prompts
from bench.engine_setup import BenchEngine
from interleaf.core import SamplingParams, TokenEvent
from interleaf.errors import ConfigError

_TURNS_BETWEEN = 8  # of the step loop, so that one request's end does not meet the next one's start


def cold_start(
    engine: BenchEngine,
    set_name: str,
    count: int,
    say: Callable[[str], None],
    *,
    background: int = 4,
    prompt_tokens: int = 128,
) -> dict[str, Any]:
    """Send a request of each of `count` adapters that are not in the pool, and the same again.

    Args:
        background: sequences of the base model that decode all the while.

    Returns: medians in milliseconds; `excess` is what the cold ones took beyond their transfer and one step.
    Raises: ConfigError: the set is empty.
    """
    adapters = adapter_set(set_name)
    if adapters is None:
        raise ConfigError("--cold-start needs adapters")
    sources = engine.lay_out(adapters, range(count + 1))
    names = engine.register(sources)
    spec, client = engine.parts.spec, engine.client
    longest = engine.parts.max_model_len - prompt_tokens
    prompts = random_prompts([prompt_tokens] * (background + 1), spec.vocab_size, seed=1)

    def params(num_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=min(num_tokens, longest), temperature=0, ignore_eos=True)

    def ttft_s(name: str) -> float:
        for _ in range(_TURNS_BETWEEN):
            client.poll()
        begin = time.perf_counter()
        id_ = client.submit(prompts[-1], params(4), name)
        first: float | None = None
        done = False
        while not done:
            for event in client.poll():
                if event.request_id == id_:
                    first = first or time.perf_counter() - begin
                    done = done or not isinstance(event, TokenEvent)
        assert first is not None
        return first

    steps = engine.recording.reset()
    open_ids = [client.submit(prompt, params(10**6), None) for prompt in prompts[:background]]
    ttft_s(names[count])  # warms the kernels; its adapter is not measured
    cold_s, warm_s = [], []
    for index in range(count):
        cold_s.append(ttft_s(names[index]))
        warm_s.append(ttft_s(names[index]))
    done_s = steps.done_s[len(steps.done_s) // 2 :]
    step_s = [b - a for a, b in pairwise(done_s)]
    for id_ in open_ids:
        client.abort(id_)
    while client.has_work:
        client.poll()
    image_bytes = [engine.images.image(engine.parts.registry.uid(name)).num_bytes for name in names.values()]
    engine.clear_adapters()

    cold_ms, warm_ms, step_ms = (1e3 * statistics.median(seconds) for seconds in (cold_s, warm_s, step_s))
    added_ms = 1e3 * statistics.median(c - w for c, w in zip(cold_s, warm_s, strict=True))
    plain_ms = transfer_ms(image_bytes[0], engine.parts.config.device)
    result = {
        "adapters": set_name,
        "pairs": count,
        "image_bytes": image_bytes[0],
        "ttft_cold_ms": cold_ms,
        "ttft_warm_ms": warm_ms,
        "added_ms": added_ms,
        "step_ms": step_ms,
        "transfer_ms": plain_ms,
        "excess_ms": added_ms - plain_ms - step_ms,
    }
    say(
        f"cold start, {set_name}: first token after {cold_ms:.2f} ms cold, {warm_ms:.2f} warm; {added_ms:.2f} more, of "
        f"which the transfer of {image_bytes[0] / 1e6:.1f} MB takes {plain_ms:.2f} and a step {step_ms:.2f}: "
        f"{added_ms - plain_ms - step_ms:+.2f} ms"
    )
    return result


def transfer_ms(num_bytes: int, device: str) -> float:
    """The best of a few plain copies of that size to the device; from pinned memory, if it is a GPU."""
    pinned = device != "cpu"
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    best_s = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if pinned:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - begin)
    return best_s * 1e3
