"""What the server has counted, and `/metrics`. Knows Prometheus' families; not how requests are observed.

Counts are plain numbers of this process; the engine's own are asked for at every scrape. Names follow vLLM's with
`interleaf:` before them, so that dashboards carry over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from interleaf.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER = "other"
"""The label of all adapters that have none of their own. An adapter of this name is counted there, too."""

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_WHOLE_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    """Observations by the first bound that is not below them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def counts(self) -> tuple[list[int], float]:
        """Observations by bound, and the sum of their values."""
        return list(self._counts), self._sum

    def add(self, counts: tuple[list[int], float]) -> None:
        """Add what another one with the same bounds has observed."""
        self._counts = [mine + other for mine, other in zip(self._counts, counts[0], strict=True)]
        self._sum += counts[1]

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative counts."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


@dataclass(slots=True)
class AdapterCounts:
    """What one label's adapters have done."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def add(self, requests: int, prompt_tokens: int, generation_tokens: int) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens


@dataclass(slots=True)
class AdapterLabels:
    """Counts per adapter under at most `capacity` labels at a time; all other adapters share `other`.

    A label goes to whoever comes first. When all are given, an adapter takes the label of the least used one once it
    has twice as many requests: rarely, because every label that ever was costs Prometheus a time series. What was
    counted under `other` stays there, so no counter ever falls.
    """

    capacity: int
    other: AdapterCounts = field(default_factory=AdapterCounts)
    _labelled: dict[str, AdapterCounts] = field(default_factory=dict)
    _retired: dict[str, AdapterCounts] = field(default_factory=dict)
    _totals: Counter[str] = field(default_factory=Counter)

    def add(self, adapter: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Count one request of an adapter."""
        self._totals[adapter] += 1
        counts = self._labelled.get(adapter) or self._promote(adapter) or self.other
        counts.add(1, prompt_tokens, generation_tokens)

    def add_counts(self, label: str, counts: AdapterCounts) -> None:
        """Add what another process has counted under a label, `other` among them."""
        target = self._labelled.get(label)
        if target is None and label != OTHER and len(self._labelled) < self.capacity:
            target = self._labelled[label] = AdapterCounts()
        (target or self.other).add(counts.requests, counts.prompt_tokens, counts.generation_tokens)
        self._totals[label] += counts.requests

    def items(self) -> Iterator[tuple[str, AdapterCounts]]:
        """(label, counts), `other` last and only if it has any."""
        yield from self._labelled.items()
        if self.other.requests:
            yield OTHER, self.other

    def _promote(self, adapter: str) -> AdapterCounts | None:
        """A label for an adapter that has none, if one is free or the least used can be had."""
        if not self.capacity or adapter == OTHER:
            return None
        if len(self._labelled) >= self.capacity:
            least = min(self._labelled, key=self._totals.__getitem__)
            if self._totals[adapter] < 2 * self._totals[least]:
                return None
            self._retired[least] = self._labelled.pop(least)
        counts = self._labelled[adapter] = self._retired.pop(adapter, AdapterCounts())
        return counts


class Counts(msgspec.Struct):
    """Everything in a Metrics, to be kept and added up. Fields are named as there; adapters are by label."""

    finished: dict[str, int]
    refused: int
    responses: dict[str, int]
    prompt_tokens: int
    generation_tokens: int
    first_token_s: tuple[list[int], float]
    between_tokens_s: tuple[list[int], float]
    whole_request_s: tuple[list[int], float]
    adapters: dict[str, AdapterCounts]


class Metrics:
    """Everything one server process has counted since it started; or, added up, what several have.

    Args:
        model: the base model's name, the label `model_name` of everything.
        num_labels: adapters with labels of their own at most.
    """

    def __init__(self, model: str, num_labels: int) -> None:
        self._model = model
        self.adapters = AdapterLabels(num_labels)
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.refused = 0
        self.responses: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(_BETWEEN_TOKENS_S)
        self.whole_request_s = Histogram(_WHOLE_REQUEST_S)

    def counts(self) -> Counts:
        """All of it at this moment."""
        return Counts(
            dict(self.finished),
            self.refused,
            dict(self.responses),
            self.prompt_tokens,
            self.generation_tokens,
            self.first_token_s.counts(),
            self.between_tokens_s.counts(),
            self.whole_request_s.counts(),
            dict(self.adapters.items()),
        )

    def add(self, counts: Counts) -> None:
        """Add what another process has counted, or one before this."""
        self.finished.update(counts.finished)
        self.refused += counts.refused
        self.responses.update(counts.responses)
        self.prompt_tokens += counts.prompt_tokens
        self.generation_tokens += counts.generation_tokens
        self.first_token_s.add(counts.first_token_s)
        self.between_tokens_s.add(counts.between_tokens_s)
        self.whole_request_s.add(counts.whole_request_s)
        for label, adapter in counts.adapters.items():
            self.adapters.add_counts(label, adapter)

    def exposition(self, stats: EngineStats | None) -> bytes:
        """The page that Prometheus reads. `stats` is None when the engine has stopped."""
        registry = CollectorRegistry()
        registry.register(_Page(self, stats))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """What was counted here."""
        yield self.counter("request_success", "Sequences that ended, by why.", "finished_reason", self.finished)
        yield self.counter("request_refused", "Requests that the engine did not accept.", None, {"": self.refused})
        yield self.counter("http_responses", "HTTP answers by status.", "status", self.responses)
        yield self.counter("prompt_tokens", "Prompt tokens of accepted requests.", None, {"": self.prompt_tokens})
        yield self.counter("generation_tokens", "Tokens generated.", None, {"": self.generation_tokens})
        for histogram, name, text in (
            (self.first_token_s, "time_to_first_token_seconds", "From a request's arrival to its first token."),
            (self.between_tokens_s, "inter_token_latency_seconds", "Between two tokens of one sequence."),
            (self.whole_request_s, "e2e_request_latency_seconds", "From a request's arrival to its end."),
        ):
            yield histogram.family(f"interleaf:{name}", text, self._model)
        items = list(self.adapters.items())
        for name, text in (
            ("requests", "Requests of an adapter."),
            ("prompt_tokens", "Prompt tokens of an adapter's requests."),
            ("generation_tokens", "Tokens generated with an adapter."),
        ):
            values = {label: getattr(counts, name) for label, counts in items}
            yield self.counter(f"adapter_{name}", text, "adapter", values)

    def engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        """What the engine has counted."""
        pool = stats.pool
        yield self.gauge("num_requests_running", "Sequences that run.", None, {"": stats.running_sequences})
        yield self.gauge("num_requests_waiting", "Sequences that wait.", None, {"": stats.waiting_sequences})
        waiting = stats.waiting_by_reason
        yield self.gauge("num_requests_waiting_by_reason", "Waiting sequences by what for.", "reason", waiting)
        pages = {"kv": pool.kv_pages, "adapter": pool.adapter_pages, "free": pool.free_pages}
        yield self.gauge("pool_pages", "Pages of the pool by what they hold.", "owner", pages)
        peaks = {"kv": pool.peak_kv_pages, "adapter": pool.peak_adapter_pages}
        yield self.gauge("pool_peak_pages", "The most pages at any one time, each by itself.", "owner", peaks)
        yield self.gauge("pool_page_bytes", "Bytes of a page.", None, {"": pool.page_bytes})
        usage = 1 - pool.free_pages / pool.total_pages if pool.total_pages else 0.0
        yield self.gauge("pool_usage_perc", "Share of the pool that is in use, 0 to 1.", None, {"": usage})
        yield self.gauge("adapters_registered", "Adapters that can be named.", None, {"": stats.registered_adapters})
        yield self.gauge("adapters_resident", "Adapters in the pool.", None, {"": stats.resident_adapters})
        for name, text, value in (
            ("num_preemptions", "Sequences that lost their seat and were computed again.", stats.preemptions),
            ("adapter_hits", "Requests whose adapter was in the pool when first considered.", stats.adapter_hits),
            ("adapter_misses", "Requests whose adapter was not.", stats.adapter_misses),
            ("adapter_loads", "Adapters copied into the pool.", stats.adapter_loads),
            ("adapter_evictions", "Adapters dropped from the pool.", stats.adapter_evictions),
            ("adapter_failed_loads", "Adapters that could not be brought back.", stats.adapter_failed_loads),
            ("engine_steps", "Steps launched.", stats.steps),
            ("engine_computed_tokens", "Rows of all steps.", stats.computed_tokens),
        ):
            yield self.counter(name, text, None, {"": value})

    def counter(self, name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
        """A counter family; `label` None has the single value under ""."""
        return self._filled(CounterMetricFamily(f"interleaf:{name}", text, labels=_labels(label)), label, values)

    def gauge(self, name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
        """A gauge family, as `counter`."""
        return self._filled(GaugeMetricFamily(f"interleaf:{name}", text, labels=_labels(label)), label, values)

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, label: str | None, values: Mapping[str, float]
    ) -> Metric:
        for key, value in values.items():
            family.add_metric([self._model] if label is None else [self._model, key], value)
        return family


class _Page(Collector):
    def __init__(self, metrics: Metrics, stats: EngineStats | None) -> None:
        self._metrics = metrics
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        up = self._stats is not None
        yield self._metrics.gauge("engine_up", "1 while the engine serves, 0 once it has stopped.", None, {"": up})
        if self._stats is not None:
            yield from self._metrics.engine_families(self._stats)


def _labels(label: str | None) -> list[str]:
    return ["model_name"] if label is None else ["model_name", label]
