"""Figures for Prometheus, which daemons show at GET /metrics of their health port.

Most are read from what a part knows anyway, when somebody asks. What leaves no state behind (a look at a job, the end
of a recovery) is told to the part's figures, by a hook that does nothing where nobody measures. Nothing is registered
globally: several parts in one process don't get into each other's way.

Words that come from elsewhere become labels only if they are among those that are known. So the number of series has a
bound; and all of them are there from the start, as 0: Prometheus sees no increase in a series that begins with 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

OTHER = "other"
"""In place of a word that is not known."""

Key = TypeVar("Key", bound=tuple[str, ...])
"""The values of the labels."""


class Tally:
    """How long something took, each time: how often it was within each of the bounds, and the sum of all."""

    def __init__(self, *bounds: float) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """With what is in the smaller ones, as Prometheus wants them."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def known(word: str, words: Iterable[str]) -> str:
    return word if word in words else OTHER


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def gauges(name: str, text: str, labels: Sequence[str], values: Mapping[Key, float]) -> Metric:
    found = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        found.add_metric(key, value)
    return found


def counters(name: str, text: str, labels: Sequence[str], values: Mapping[Key, float]) -> Metric:
    found = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        found.add_metric(key, value)
    return found


def histogram(name: str, text: str, tally: Tally) -> Metric:
    return HistogramMetricFamily(name, text, buckets=tally.buckets(), sum_value=tally.sum)


def histograms(name: str, text: str, label: str, tallies: Mapping[str, Tally]) -> Metric:
    found = HistogramMetricFamily(name, text, labels=[label])
    for key, tally in tallies.items():
        found.add_metric([key], tally.buckets(), tally.sum)
    return found


def summaries(name: str, text: str, label: str, tallies: Mapping[str, Tally]) -> Metric:
    """Number and sum alone."""
    found = SummaryMetricFamily(name, text, labels=[label])
    for key, tally in tallies.items():
        found.add_metric([key], tally.count, tally.sum)
    return found


def requests(answers: Mapping[tuple[str, str], int]) -> Metric:
    """Of the client of the API server."""
    text = "Requests to the API server, by HTTP method and status; status none: there was no answer."
    return counters("evertrain_api_requests_total", text, ["method", "status"], answers)


def page(collect: Callable[[], Iterable[Metric]]) -> Callable[[], bytes]:
    """What is shown: those figures as they are then, and those of the process (CPU, memory, open files)."""

    class Figures(Collector):
        def collect(self) -> Iterable[Metric]:
            return collect()

    registry = CollectorRegistry()
    registry.register(Figures())
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
