"""`KvMetricsCollector`: exports an engine's transfer metrics to Prometheus."""

import itertools
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore.metrics import BUCKETS_S, METRICS, Histogram, KvMetrics, MetricInfo

__all__ = ["KvMetricsCollector"]

_BOUNDS = tuple(map(floatToGoString, (*BUCKETS_S, float("inf"))))


class KvMetricsCollector(Collector):
    """A collector for a registry of `prometheus_client`.

    It reads stores' statistics in the thread that collects.

    Args:
        metrics: of one engine.
    """

    def __init__(self, metrics: KvMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of all backends."""
        snapshots = {name: metrics.snapshot() for name, metrics in self._metrics.all().items()}
        numbers = {name: numbers for name, (numbers, _) in snapshots.items()}
        histograms = {name: histograms for name, (_, histograms) in snapshots.items()}
        for name, info in METRICS.items():
            if info.kind == "histogram":
                yield _histogram_family(name, info, histograms)
            else:
                yield _number_family(name, info, numbers)


def _number_family(
    name: str, info: MetricInfo, backends: Mapping[str, Mapping[tuple[str, ...], float]]
) -> Metric:
    kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
    family = kind(name, info.text, labels=("backend", *info.labels))
    for backend, numbers in backends.items():
        for values in info.label_values():
            if (name, *values) in numbers:  # a store may lack the value
                family.add_metric((backend, *values), numbers[name, *values])
    return family


def _histogram_family(
    name: str, info: MetricInfo, backends: Mapping[str, Mapping[tuple[str, ...], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(name, info.text, labels=("backend", *info.labels))
    for backend, histograms in backends.items():
        for values in info.label_values():
            histogram = histograms[name, *values]
            family.add_metric((backend, *values), _buckets(histogram), histogram.total_s)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns cumulative buckets, as Prometheus wants them."""
    return list(zip(_BOUNDS, itertools.accumulate(histogram.counts), strict=True))
