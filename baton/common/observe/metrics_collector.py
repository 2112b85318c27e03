"""`MetricsCollector`: exports the metrics of a table to Prometheus."""

import itertools
from collections.abc import Iterator
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.common.observe.metrics import Histogram, MetricInfo, MetricsSource, Series

__all__ = ["MetricsCollector"]

_T = TypeVar("_T")


class MetricsCollector(Collector):
    """A collector for a registry of `prometheus_client`.

    It takes the snapshot in the thread that collects.

    Args:
        source: the metrics.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of the table."""
        snapshot = self._source.snapshot()
        values, histograms = _by_name(snapshot.values), _by_name(snapshot.histograms)
        for name, info in self._source.infos.items():
            if info.kind == "histogram":
                yield _histogram_family(name, info, histograms.get(name, {}))
            else:
                yield _number_family(name, info, values.get(name, {}))


def _by_name(values: dict[Series, _T]) -> dict[str, dict[Series, _T]]:
    names: dict[str, dict[Series, _T]] = {}
    for (name, *labels), value in values.items():
        names.setdefault(name, {})[tuple(labels)] = value
    return names


def _number_family(name: str, info: MetricInfo, numbers: dict[Series, float]) -> Metric:
    kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
    family = kind(name, info.text, labels=tuple(info.labels))
    for labels, number in numbers.items():
        family.add_metric(labels, number)
    return family


def _histogram_family(name: str, info: MetricInfo, histograms: dict[Series, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, info.text, labels=tuple(info.labels))
    for labels, histogram in histograms.items():
        family.add_metric(labels, _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns cumulative buckets, as Prometheus wants them."""
    bounds = map(floatToGoString, (*histogram.bounds, float("inf")))
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
