"""Prometheus' families in this server's dress: names after a prefix, the model's name on everything. Counts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

PREFIX = "interleaf:"


class Families:
    """Makes families of one model.

    Values come by the label's value, or by several labels' in a tuple; without a label the single value is under "".
    """

    def __init__(self, model: str) -> None:
        self.model = model

    def counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        """A counter family; Prometheus' name ends in _total."""
        return self._filled(CounterMetricFamily(PREFIX + name, text, labels=("model_name", *labels)), values)

    def gauge(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        """A gauge family."""
        return self._filled(GaugeMetricFamily(PREFIX + name, text, labels=("model_name", *labels)), values)

    def summary(self, name: str, text: str, values: Mapping[str, tuple[int, float]], label: str) -> Metric:
        """Count and sum by a label's value."""
        family = SummaryMetricFamily(PREFIX + name, text, labels=("model_name", label))
        for key, (count, total) in values.items():
            family.add_metric([self.model, key], count, total)
        return family

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
        for key, value in values.items():
            keys = (key,) if isinstance(key, str) else key
            family.add_metric([self.model, *keys] if key else [self.model], value)
        return family
