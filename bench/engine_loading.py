"""What copies of adapters cost the steps beside them, and how fast they are meanwhile. Compares windows of one batch.

The copies take the engine's own way (plans with loads, the copy stream, its events) into pages held back for them, but
no request asks for them: every step computes the same, with and without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from bench.engine_cold import transfer_ms
from bench.engine_rows import adapter_set, random_prompts
from bench.engine_setup import BenchEngine
from interleaf.core import AdapterLoad, AdapterUid, SamplingParams, StepPlan
from interleaf.errors import ConfigError

_SETTLE_STEPS = 8


def loading(
    engine: BenchEngine,
    set_name: str,
    num_steps: int,
    say: Callable[[str], None],
    *,
    rows: int = 256,
    context_tokens: int = 400,
    rounds: int = 4,
    under_way: int = 32,
) -> dict[str, Any]:
    """Decode a steady batch of the base model, in half of the windows beside copies that never end.

    Args:
        num_steps: of a window.
        rows: sequences that decode.
        rounds: pairs of windows, the order alternating.
        under_way: copies that wait for their turn on the link or have it, at most.

    Returns: milliseconds of a step, bytes a second of the copies, and of a plain copy.
    Raises: ConfigError: the set is empty.
    """
    adapters = adapter_set(set_name)
    if adapters is None:
        raise ConfigError("--loading needs adapters")
    names = engine.register(engine.lay_out(adapters, range(under_way)))
    uids = [engine.parts.registry.uid(name) for name in names.values()]
    num_bytes = engine.images.image(uids[0]).num_bytes
    copies = _Copies(engine, uids)
    client, recording = engine.client, engine.recording
    prompts = random_prompts([context_tokens] * rows, engine.parts.spec.vocab_size, seed=3)
    longest = engine.parts.max_model_len - context_tokens
    params = SamplingParams(max_tokens=min(10**6, longest), temperature=0, ignore_eos=True)
    open_ids = [client.submit(prompt, params, None) for prompt in prompts]
    log = recording.reset()
    while not log.plans or len(log.plans[-1].decode) < rows:
        client.poll()

    def window(is_loading: bool) -> tuple[list[float], float]:
        """Milliseconds of each step, and copies a second."""
        for settled in range(_SETTLE_STEPS + num_steps):
            if settled == _SETTLE_STEPS:
                log, begin_s, before = recording.reset(), time.perf_counter(), copies.num_ended
            if is_loading:
                copies.top_up()
            client.poll()
        rate = (copies.num_ended - before) / (time.perf_counter() - begin_s)
        while is_loading and copies.num_under_way:
            client.poll()
        return [1e3 * (b - a) for a, b in pairwise(log.done_s[:num_steps])], rate

    quiet: list[list[float]] = []
    busy: list[list[float]] = []
    rates: list[float] = []
    for turn in range(rounds):
        for is_loading in (False, True) if turn % 2 == 0 else (True, False):
            steps, rate = window(is_loading)
            (busy if is_loading else quiet).append(steps)
            rates += [rate] * is_loading
    for id_ in open_ids:
        client.abort(id_)
    while client.has_work:
        client.poll()
    copies.close()
    engine.clear_adapters()

    def ratio(of: Callable[[list[float]], float]) -> float:
        return statistics.median(of(b) / of(q) for b, q in zip(busy, quiet, strict=True))

    link = num_bytes / (1e-3 * transfer_ms(num_bytes, engine.parts.config.device))
    reached = statistics.median(rates) * num_bytes
    result = {
        "adapters": set_name,
        "rows": rows,
        "image_bytes": num_bytes,
        "steps_ms": statistics.median(map(statistics.median, quiet)),
        "p50_ratio": ratio(statistics.median),
        "p99_ratio": ratio(_p99),
        "bytes_per_s": reached,
        "link_bytes_per_s": link,
    }
    say(
        f"loading beside {rows} rows: a step of {result['steps_ms']:.2f} ms takes {result['p50_ratio']:.3f} times that "
        f"(p99 {result['p99_ratio']:.3f}); {reached / 1e9:.1f} GB/s copied, {reached / link:.0%} of a plain copy's"
    )
    return result


class _Copies:
    """Copies of some adapters, again and again, each into pages of its own."""

    def __init__(self, engine: BenchEngine, uids: list[AdapterUid]) -> None:
        self._engine = engine
        self._idle = list(uids)
        self._known: set[AdapterUid] = set()
        counts = {uid: engine.images.layout(uid).pages for uid in uids}
        held = iter(engine.hold(sum(counts.values())))
        self._pages = {uid: tuple(next(held) for _ in range(count)) for uid, count in counts.items()}
        engine.recording.apart = set(uids)
        self.num_ended = 0

    @property
    def num_under_way(self) -> int:
        """Copies that have not been reported."""
        self._collect()
        return len(self._pages) - len(self._idle)

    def top_up(self) -> None:
        """Begin every copy that is not under way."""
        self._collect()
        if self._idle:
            loads = tuple(AdapterLoad(uid, self._pages[uid]) for uid in self._idle)
            evict = tuple(uid for uid in self._idle if uid in self._known)
            self._known.update(self._idle)
            self._idle.clear()
            self._engine.recording.launch_apart(StepPlan(0, evict=evict, load=loads))

    def close(self) -> None:
        """Give the pages back. No copy may be under way."""
        assert not self.num_under_way
        self._engine.recording.launch_apart(StepPlan(0, evict=tuple(self._known)))
        self._engine.recording.apart = set()
        self._engine.hold(0)

    def _collect(self) -> None:
        for report in self._engine.recording.take_reports_apart():
            if report.error is not None:
                raise RuntimeError(report.error)
            self._idle.append(report.uid)
            self.num_ended += 1


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
