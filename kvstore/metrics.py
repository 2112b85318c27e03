"""`TransferMetrics`: counters and histograms of the transfers of one backend. Pure.

Connectors count here, from any thread; `kvstore.metrics_collector` exports the
values to Prometheus. To add a metric, add a `MetricInfo` to `METRICS`, a method
that counts it, and a line in docs/metrics.md.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

from kvstore.breaker import BreakerCounts
from kvstore.store import StoreStats

__all__ = [
    "BUCKETS_S",
    "METRICS",
    "Direction",
    "Histogram",
    "KvMetrics",
    "MetricInfo",
    "TransferMetrics",
]

Direction = Literal["save", "load"]

DIRECTIONS: tuple[Direction, ...] = ("save", "load")
CAUSES = ("missing", "corrupt", "unavailable", "timed_out", "cancelled", "failed")
STAGES = ("admission", "loading")

# A block from shared memory takes 0.1 ms, a call that times out seconds.
_STEPS = (1.0, 2.5, 5.0)
BUCKETS_S = (*(step * 10.0**power for power in range(-4, 1) for step in _STEPS), 10.0)
"""Upper bounds of the histograms' buckets, in seconds."""

_Series = tuple[str, ...]
"""A metric's name, and the values of its labels without the backend."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric. All metrics have the label `backend`.

    Attributes:
        kind: "counter", "gauge" or "histogram" (of seconds).
        text: its help text.
        labels: its other labels, each with all values.
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def label_values(self) -> Iterable[tuple[str, ...]]:
        """Returns every combination of the labels' values."""
        return itertools.product(*self.labels.values())


_PER_DIRECTION = {"direction": DIRECTIONS}

# Names of counters lack the suffix `_total`, which Prometheus adds.
METRICS: dict[str, MetricInfo] = {
    "baton_kv_objects": MetricInfo("counter", "Objects moved by calls.", _PER_DIRECTION),
    "baton_kv_bytes": MetricInfo("counter", "Bytes moved by calls.", _PER_DIRECTION),
    "baton_kv_call_seconds": MetricInfo(
        "histogram", "Calls of the backend, each for up to a segment.", _PER_DIRECTION
    ),
    "baton_kv_job_seconds": MetricInfo(
        "histogram", "Saves and loads, from their start to their result.", _PER_DIRECTION
    ),
    "baton_kv_failures": MetricInfo(
        "counter",
        "Saves and loads that ended with less than asked.",
        {**_PER_DIRECTION, "cause": CAUSES},
    ),
    "baton_kv_skipped_objects": MetricInfo(
        "counter", "Objects not saved because the backend held them."
    ),
    "baton_kv_lookup_seconds": MetricInfo(
        "histogram", "Look-ups, from their start to their answer."
    ),
    "baton_kv_lookup_objects": MetricInfo("counter", "Blocks that look-ups asked for."),
    "baton_kv_lookup_hits": MetricInfo("counter", "Blocks that look-ups found."),
    "baton_kv_verify_failures": MetricInfo(
        "counter", "Objects refused because their bytes are not what was saved."
    ),
    "baton_kv_lease_renewals": MetricInfo("counter", "Leases on others' blocks renewed."),
    "baton_kv_expired_leases": MetricInfo(
        "counter", "Leases on own blocks that ran out without being released."
    ),
    "baton_kv_objects_in_doubt": MetricInfo(
        "gauge",
        "Objects of failed loads whose blocks are held, as something may write there.",
    ),
    "baton_kv_prompt_save_seconds": MetricInfo(
        "counter", "Time in which a prompt had saves under way, over all prompts."
    ),
    "baton_kv_hidden_prompt_save_seconds": MetricInfo(
        "counter", "Of it, the time in which the prompt was still being computed."
    ),
    "baton_kv_stored_objects": MetricInfo("gauge", "Objects that the store holds."),
    "baton_kv_stored_bytes": MetricInfo("gauge", "Bytes that the store holds."),
    "baton_kv_oldest_object_seconds": MetricInfo(
        "gauge", "Age of the least recently touched object, since its last touch."
    ),
    "baton_kv_evictions": MetricInfo("counter", "Objects that the store removed to make room."),
    "baton_kv_expirations": MetricInfo(
        "counter", "Objects that the store removed because their TTL was over."
    ),
    "baton_kv_open_breakers": MetricInfo(
        "gauge", "Breakers that spare a backend which does not answer.", _PER_DIRECTION
    ),
    "baton_kv_breaker_openings": MetricInfo(
        "counter", "Times that a breaker has opened.", _PER_DIRECTION
    ),
    "baton_kv_loads_given_up": MetricInfo(
        "counter",
        "Loads not begun, or given up, because computing is cheaper.",
        {"stage": STAGES},
    ),
}

# Metrics that are fields of `StoreStats`.
_FROM_STATS = {
    "baton_kv_stored_objects": "num_objects",
    "baton_kv_stored_bytes": "num_bytes",
    "baton_kv_oldest_object_seconds": "oldest_age_s",
    "baton_kv_evictions": "evictions",
    "baton_kv_expirations": "expirations",
}


@dataclass(slots=True)
class Histogram:
    """A histogram of seconds.

    Attributes:
        counts: number of values in each bucket of `BUCKETS_S`, and of those beyond the last.
        total_s: sum of the values.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class TransferMetrics:
    """Metrics of one backend. Thread-safe; each method takes well under a microsecond.

    Attributes:
        read_stats: returns a store's statistics; None without a store.
        read_breakers: returns the state of each breaker, with the direction of the calls it stops.
    """

    def __init__(self) -> None:
        self.read_stats: Callable[[], StoreStats] | None = None
        self.read_breakers: Callable[[], Iterable[tuple[Direction, BreakerCounts]]] = tuple
        self._lock = Lock()
        self._values: dict[_Series, float] = {}
        self._histograms: dict[_Series, Histogram] = {}
        for name, info in METRICS.items():
            if name in _FROM_STATS:
                continue
            for labels in info.label_values():
                if info.kind == "histogram":
                    self._histograms[name, *labels] = Histogram()
                else:
                    self._values[name, *labels] = 0

    def called(
        self, direction: Direction, seconds: float, num_objects: int = 0, num_bytes: int = 0
    ) -> None:
        """Counts a call of the backend that has ended, and what it moved."""
        with self._lock:
            self._histograms["baton_kv_call_seconds", direction].add(seconds)
            self._values["baton_kv_objects", direction] += num_objects
            self._values["baton_kv_bytes", direction] += num_bytes

    def job_ended(self, direction: Direction, seconds: float, error: str = "") -> None:
        """Counts a save or load that has its result.

        Args:
            direction: save or load.
            seconds: since its start.
            error: see `LoadResult`.
        """
        with self._lock:
            self._histograms["baton_kv_job_seconds", direction].add(seconds)
        if error:
            self.failed(direction, error)

    def failed(self, direction: Direction, error: str) -> None:
        """Counts a save or load that ended incomplete; for `error` see `LoadResult`."""
        cause = error.replace(" ", "_")
        self._add(1, "baton_kv_failures", direction, cause if cause in CAUSES else "failed")

    def skipped(self, num_objects: int) -> None:
        """Counts objects that were not saved because the backend holds them."""
        self._add(num_objects, "baton_kv_skipped_objects")

    def looked_up(self, seconds: float, num_asked: int, num_found: int) -> None:
        """Counts a look-up that is answered."""
        with self._lock:
            self._histograms["baton_kv_lookup_seconds",].add(seconds)
            self._values["baton_kv_lookup_objects",] += num_asked
            self._values["baton_kv_lookup_hits",] += num_found

    def verify_failed(self) -> None:
        """Counts an object that is torn, changed, or another key's."""
        self._add(1, "baton_kv_verify_failures")

    def leases_renewed(self, count: int) -> None:
        """Counts renewals of leases on other processes' blocks."""
        self._add(count, "baton_kv_lease_renewals")

    def leases_expired(self, count: int) -> None:
        """Counts leases on own blocks that ran out without being released."""
        self._add(count, "baton_kv_expired_leases")

    def set_in_doubt(self, num_objects: int) -> None:
        """Sets the number of objects whose blocks are held, because something may write there."""
        with self._lock:
            self._values["baton_kv_objects_in_doubt",] = num_objects

    def prompt_saved(self, seconds: float, hidden_s: float) -> None:
        """Counts the saves of a prompt; in `hidden_s` of their time it was still computed."""
        with self._lock:
            self._values["baton_kv_prompt_save_seconds",] += seconds
            self._values["baton_kv_hidden_prompt_save_seconds",] += hidden_s

    def load_given_up(self, stage: Literal["admission", "loading"]) -> None:
        """Counts a load that was not begun, or given up, because computing is cheaper."""
        self._add(1, "baton_kv_loads_given_up", stage)

    def snapshot(self) -> tuple[dict[_Series, float], dict[_Series, Histogram]]:
        """Returns all values and histograms. Waits for a store's statistics."""
        read = self._read_stats() | self._read_breakers()
        with self._lock:
            histograms = {
                series: Histogram(list(histogram.counts), histogram.total_s)
                for series, histogram in self._histograms.items()
            }
            return self._values | read, histograms

    def _read_stats(self) -> dict[_Series, float]:
        """Returns the store's statistics, without those that are None."""
        if self.read_stats is None:
            return {}
        stats = self.read_stats()
        known = {name: getattr(stats, field) for name, field in _FROM_STATS.items()}
        return {(name,): value for name, value in known.items() if value is not None}

    def _read_breakers(self) -> dict[_Series, float]:
        values: Counter[_Series] = Counter()
        for direction, counts in self.read_breakers():
            values["baton_kv_open_breakers", direction] += counts.num_open
            values["baton_kv_breaker_openings", direction] += counts.num_opened
        return dict(values)

    def _add(self, amount: float, *series: str) -> None:
        with self._lock:
            self._values[series] += amount


class KvMetrics:
    """The `TransferMetrics` of one engine, by backend."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._backends: dict[str, TransferMetrics] = {}

    def of(self, backend: str) -> TransferMetrics:
        """Returns the metrics of a backend, by its name in Prometheus."""
        with self._lock:
            return self._backends.setdefault(backend, TransferMetrics())

    def all(self) -> dict[str, TransferMetrics]:
        """Returns the metrics of all backends by name."""
        with self._lock:
            return dict(self._backends)
