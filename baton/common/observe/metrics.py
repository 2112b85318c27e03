"""Counters, gauges and histograms of one process. Pure; `metrics_collector` exports them.

A table of `MetricInfo` by name says what exists, and `Metrics` counts it:

    METRICS = {"baton_pies": MetricInfo("counter", "Pies eaten.", {"kind": ("apple", "plum")})}
    metrics = Metrics(METRICS)
    metrics.add("baton_pies", 2, "plum")

Names of counters lack the suffix `_total`, which Prometheus adds. docs/metrics.md lists every
metric, and a test compares it with the tables.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Literal, NamedTuple, Protocol

__all__ = [
    "BUCKETS_S",
    "MAX_OPEN_VALUES",
    "OTHER",
    "Histogram",
    "MetricInfo",
    "Metrics",
    "MetricsSource",
    "Series",
    "Snapshot",
    "buckets_between",
]

OTHER = "other"
"""What a label with an open set of values is once the set is full."""

MAX_OPEN_VALUES = 100
"""The most values of a label with an open set, not counting `OTHER`."""

Series = tuple[str, ...]
"""A metric's name, and the values of its labels."""


def buckets_between(first: float, last: float) -> tuple[float, ...]:
    """Returns bounds 1, 2.5 and 5 times each power of ten, from `first` to `last`."""
    bounds = (step * 10.0**power for power in range(-7, 10) for step in (1.0, 2.5, 5.0))
    return tuple(bound for bound in bounds if first <= bound * 1.0001 and bound <= last * 1.0001)


# A block from shared memory takes 0.1 ms, a call that times out seconds.
BUCKETS_S = buckets_between(1e-4, 10.0)
"""Upper bounds of a histogram's buckets, in seconds, unless its `MetricInfo` names others."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        text: its help text.
        labels: its labels, each with all its values; None for a set that is not known in
            advance, of which `MAX_OPEN_VALUES` are distinguished.
        buckets: upper bounds of a histogram's buckets, ascending.
        across: how gauges of a router's processes become one: the sum, or the largest where all of
            them see the same, such as replicas.
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    buckets: tuple[float, ...] = BUCKETS_S
    across: Literal["sum", "max"] = "sum"

    def known_labels(self) -> Iterable[tuple[str, ...]]:
        """Returns every combination of the labels' values; none if a set is open."""
        return itertools.product(*(values or () for values in self.labels.values()))

    def with_label(self, name: str) -> "MetricInfo":
        """Returns the metric with one more label, its first, whose set is open."""
        return replace(self, labels={name: None, **self.labels})


@dataclass(slots=True)
class Histogram:
    """The numbers of values in buckets.

    Attributes:
        bounds: upper bounds of the buckets, inclusive.
        counts: number of values in each bucket, and of those beyond the last.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> "Histogram":
        """Returns a histogram without values."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def copy(self) -> "Histogram":
        """Returns a copy that further values do not change."""
        return Histogram(self.bounds, list(self.counts), self.total)


class Snapshot(NamedTuple):
    """All metrics at one moment."""

    values: dict[Series, float]
    histograms: dict[Series, Histogram]


class MetricsSource(Protocol):
    """A source of metrics to export: `Metrics`, or a class that adds values read at the export."""

    @property
    def infos(self) -> Mapping[str, MetricInfo]:
        """The table of metrics by name."""

    def snapshot(self) -> Snapshot:
        """Returns the metrics as of now. Called by any thread."""


class Metrics:
    """Counts the metrics of a table. Thread-safe; a call takes about half a microsecond.

    All series of labels with known values exist from the start, with 0.

    Args:
        infos: the table.

    Attributes:
        infos: the table.
    """

    def __init__(self, infos: Mapping[str, MetricInfo]) -> None:
        self.infos = infos
        self._lock = Lock()
        self._values: dict[Series, float] = {}
        self._histograms: dict[Series, Histogram] = {}
        self._open_values: dict[str, set[str]] = {}  # by label
        for name, info in infos.items():
            for labels in info.known_labels():
                self._create((name, *labels))

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Adds to a counter or a gauge.

        Args:
            name: the metric's.
            amount: how much.
            labels: one value per label, in the order of the table.

        Raises:
            ValueError: the table has no such metric or label value, which is a bug.
        """
        series = (name, *labels)
        with self._lock:
            if series not in self._values:
                series = self._create(series)
            self._values[series] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge; see `add`."""
        series = (name, *labels)
        with self._lock:
            if series not in self._values:
                series = self._create(series)
            self._values[series] = value

    def observe(self, name: str, value: float, *labels: str, count: int = 1) -> None:
        """Adds a value to a histogram, `count` times; see `add`."""
        series = (name, *labels)
        with self._lock:
            histogram = self._histograms.get(series)
            if histogram is None:
                histogram = self._histograms[self._create(series)]
            histogram.counts[bisect_left(histogram.bounds, value)] += count
            histogram.total += value * count

    def snapshot(self) -> Snapshot:
        """Returns all values and histograms."""
        with self._lock:
            histograms = {
                series: histogram.copy() for series, histogram in self._histograms.items()
            }
            return Snapshot(dict(self._values), histograms)

    def _create(self, series: Series) -> Series:
        """Makes a series that does not exist; returns it, with `OTHER` where a set is full."""
        name, *labels = series
        info = self.infos.get(name)
        if info is None or len(labels) != len(info.labels):
            raise ValueError(f"there is no metric {series}")
        bounded = (
            self._bounded(label, known, value)
            for (label, known), value in zip(info.labels.items(), labels, strict=True)
        )
        series = (name, *bounded)
        if info.kind == "histogram":
            self._histograms.setdefault(series, Histogram.empty(info.buckets))
        else:
            self._values.setdefault(series, 0)
        return series

    def _bounded(self, label: str, known: tuple[str, ...] | None, value: str) -> str:
        if known is not None:
            if value not in known:
                raise ValueError(f"the label {label} has no value {value!r}")
            return value
        seen = self._open_values.setdefault(label, set())
        if value not in seen and len(seen) >= MAX_OPEN_VALUES:
            return OTHER
        seen.add(value)
        return value
