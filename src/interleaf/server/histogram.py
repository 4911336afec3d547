"""Observations in classes, as Prometheus wants them. Knows no metric by name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


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
