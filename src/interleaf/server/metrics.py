"""What the server has counted, and `/metrics`. Knows Prometheus' families; not how requests are observed.

Counts are plain numbers of this process; the engine's own are asked for at every scrape. Names follow vLLM's with
`interleaf:` before them, so that dashboards carry over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from interleaf.core import AdapterFound
from interleaf.scheduler.sequence import WaitReason
from interleaf.server.engine_metrics import engine_families
from interleaf.server.families import PREFIX, Families
from interleaf.server.histogram import Histogram
from interleaf.server.label_table import LabelTable
from interleaf.server.labels import AdapterCounts, AdapterLabels, add_up
from interleaf.server.last_stats import Snapshot

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_WAITED = "Time that sequences waited for their first seat, or until they ended, by what for."
_WAITED_AGAIN = "Time that sequences waited after they had lost their seat, by what for."

_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_WHOLE_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Counts(msgspec.Struct):
    """Everything in a Metrics, to be kept and added up. Fields are named as there; adapters are by label."""

    finished: dict[str, int]
    refused: int
    responses: dict[str, int]
    prompt_tokens: int
    generation_tokens: int
    first_token_s: tuple[list[int], float]
    between_tokens_s: tuple[list[int], float]
    queue_s: tuple[list[int], float]
    whole_request_s: tuple[list[int], float]
    waits: dict[str, float]
    waits_again: dict[str, float]
    adapters: dict[str, AdapterCounts]


class Metrics:
    """Everything one server process has counted since it started; or, added up, what several have.

    Args:
        model: the base model's name, the label `model_name` of everything.
        table: the adapters with labels of their own.
    """

    def __init__(self, model: str, table: LabelTable) -> None:
        self.make = Families(model)
        self.table = table
        self.adapters = AdapterLabels(table)
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.refused = 0
        self.responses: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(_BETWEEN_TOKENS_S)
        self.queue_s = Histogram(_QUEUE_S)
        self.whole_request_s = Histogram(_WHOLE_REQUEST_S)
        self.waits: dict[str, float] = {}
        self.waits_again: dict[str, float] = {}

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
            self.queue_s.counts(),
            self.whole_request_s.counts(),
            dict(self.waits),
            dict(self.waits_again),
            self.adapters.all_counts(),
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
        self.queue_s.add(counts.queue_s)
        self.whole_request_s.add(counts.whole_request_s)
        add_up(self.waits, counts.waits)
        add_up(self.waits_again, counts.waits_again)
        for label, adapter in counts.adapters.items():
            self.adapters.add_counts(label, adapter)

    def exposition(self, engine: Snapshot | None) -> bytes:
        """The page that Prometheus reads; without an engine, what was counted here."""
        registry = CollectorRegistry()
        registry.register(_Page(self, engine))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """What was counted here."""
        make = self.make
        yield make.counter("request_success", "Sequences that ended, by why.", self.finished, "finished_reason")
        yield make.counter("request_refused", "Requests that the engine did not accept.", {"": self.refused})
        yield make.counter("http_responses", "HTTP answers by status.", self.responses, "status")
        yield make.counter("prompt_tokens", "Prompt tokens of accepted requests.", {"": self.prompt_tokens})
        yield make.counter("generation_tokens", "Tokens generated.", {"": self.generation_tokens})
        for histogram, name, text in (
            (self.first_token_s, "time_to_first_token_seconds", "From a request's arrival to its first token."),
            (self.between_tokens_s, "inter_token_latency_seconds", "Between two tokens of one sequence."),
            (self.queue_s, "request_queue_time_seconds", "From a request's arrival at the engine to its first seat."),
            (self.whole_request_s, "e2e_request_latency_seconds", "From a request's arrival to its end."),
        ):
            yield histogram.family(PREFIX + name, text, make.model)
        no_waits = {reason.value: 0.0 for reason in WaitReason}
        yield make.counter("request_queue_time_by_reason_seconds", _WAITED, no_waits | self.waits, "reason")
        yield make.counter("request_preempted_time_seconds", _WAITED_AGAIN, no_waits | self.waits_again, "reason")
        yield from self._adapter_families(dict(self.adapters.items()))

    def _adapter_families(self, adapters: Mapping[str, AdapterCounts]) -> Iterator[Metric]:
        make = self.make
        for name, text in (
            ("requests", "Requests of an adapter."),
            ("prompt_tokens", "Prompt tokens of an adapter's requests."),
            ("generation_tokens", "Tokens generated with an adapter."),
        ):
            values = {label: getattr(counts, name) for label, counts in adapters.items()}
            yield make.counter(f"adapter_{name}", text, values, "adapter")
        for name, text, number, seconds in (
            ("time_to_first_token", "From a request's arrival to its first token.", "first_tokens", "first_token_s"),
            ("queue_time", "From a request's arrival at the engine to a sequence's seat.", "starts", "queue_s"),
            ("used_load", "Loads that a sequence has used, from sending for the adapter on.", "loads", "load_s"),
        ):
            pairs = {label: (getattr(each, number), getattr(each, seconds)) for label, each in adapters.items()}
            yield make.summary(f"adapter_{name}_seconds", text, pairs, "adapter")
        for name, text, field in (
            ("queue_time_by_reason", _WAITED, "waits"),
            ("preempted_time", _WAITED_AGAIN, "waits_again"),
        ):
            waits = {
                (label, reason): seconds
                for label, each in adapters.items()
                for reason, seconds in getattr(each, field).items()
            }
            yield make.counter(f"adapter_{name}_seconds", text, waits, "adapter", "reason")
        text = "Sequences that started, by where their adapter was when first considered."
        found = {
            (label, where.value): getattr(each, where.value)
            for label, each in adapters.items()
            for where in AdapterFound
        }
        yield make.counter("adapter_lookups", text, found, "adapter", "found")


class _Page(Collector):
    def __init__(self, metrics: Metrics, engine: Snapshot | None) -> None:
        self._metrics = metrics
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        make, engine = self._metrics.make, self._engine
        up = engine is not None and engine.is_up
        yield make.gauge("engine_up", "1 while the engine serves, 0 once it has stopped.", {"": up})
        if engine is None or not engine.is_up:
            return
        text = "Age of what follows: it grows while a step hangs, and the engine does not answer."
        yield make.gauge("engine_stats_age_seconds", text, {"": engine.age_s})
        if engine.stats is not None:
            yield from engine_families(make, engine.stats, self._metrics.adapters)
