"""`TransferMetrics`: what the transfers of one backend add up to. Pure.

Whoever moves KV counts here, from any thread; `kvstore.metrics_collector` shows
the sums to Prometheus when it asks. A further metric is a `MetricInfo` in
`METRICS` and a method that adds to it, and a line in docs/metrics.md.
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
"""Upper bounds of the histograms' buckets."""

_Series = tuple[str, ...]
"""A metric's name, and the values of its labels but for the backend."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric of a backend. All have the label `backend`.

    Attributes:
        kind: "counter", "gauge" or "histogram" (of seconds).
        text: what it tells.
        labels: further labels, each with all its values.
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def label_values(self) -> Iterable[tuple[str, ...]]:
        """Every combination of the labels' values."""
        return itertools.product(*self.labels.values())


_PER_DIRECTION = {"direction": DIRECTIONS}

# Names of counters are without the `_total` that Prometheus sees.
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

# Metrics that are read off `StoreStats`, and the attribute that each is.
_FROM_STATS = {
    "baton_kv_stored_objects": "num_objects",
    "baton_kv_stored_bytes": "num_bytes",
    "baton_kv_oldest_object_seconds": "oldest_age_s",
    "baton_kv_evictions": "evictions",
    "baton_kv_expirations": "expirations",
}


@dataclass(slots=True)
class Histogram:
    """Seconds: how many fell into each bucket, and their sum.

    Attributes:
        counts: per bound of `BUCKETS_S` those above the bound before it, then those beyond all.
        total_s: the sum.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class TransferMetrics:
    """Counts for one backend. Thread-safe; each method takes well under a microsecond.

    Attributes:
        read_stats: a store's `stats`, for when Prometheus asks; None where there is none.
        read_breakers: of what guards the backend, with the direction of the calls that it stops.
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
        """A call of the backend has ended, having moved so much."""
        with self._lock:
            self._histograms["baton_kv_call_seconds", direction].add(seconds)
            self._values["baton_kv_objects", direction] += num_objects
            self._values["baton_kv_bytes", direction] += num_bytes

    def job_ended(self, direction: Direction, seconds: float, error: str = "") -> None:
        """A save or load has its result.

        Args:
            direction: which of them.
            seconds: since its start.
            error: as in `LoadResult`.
        """
        with self._lock:
            self._histograms["baton_kv_job_seconds", direction].add(seconds)
        if error:
            self.failed(direction, error)

    def failed(self, direction: Direction, error: str) -> None:
        """A save or load ended with less than asked; `error` as in `LoadResult`."""
        cause = error.replace(" ", "_")
        self._add(1, "baton_kv_failures", direction, cause if cause in CAUSES else "failed")

    def skipped(self, num_objects: int) -> None:
        """So many objects need not be saved, for the backend holds them."""
        self._add(num_objects, "baton_kv_skipped_objects")

    def looked_up(self, seconds: float, num_asked: int, num_found: int) -> None:
        """A look-up is answered."""
        with self._lock:
            self._histograms["baton_kv_lookup_seconds",].add(seconds)
            self._values["baton_kv_lookup_objects",] += num_asked
            self._values["baton_kv_lookup_hits",] += num_found

    def verify_failed(self) -> None:
        """An object is torn, changed, or another's."""
        self._add(1, "baton_kv_verify_failures")

    def leases_renewed(self, count: int) -> None:
        """Leases on others' blocks live on."""
        self._add(count, "baton_kv_lease_renewals")

    def leases_expired(self, count: int) -> None:
        """Leases on own blocks ran out, unreleased."""
        self._add(count, "baton_kv_expired_leases")

    def set_in_doubt(self, num_objects: int) -> None:
        """So many objects' places in the pool are out of use now."""
        with self._lock:
            self._values["baton_kv_objects_in_doubt",] = num_objects

    def prompt_saved(self, seconds: float, hidden_s: float) -> None:
        """A prompt's last save has ended; `hidden_s` of its saves' time it was being computed."""
        with self._lock:
            self._values["baton_kv_prompt_save_seconds",] += seconds
            self._values["baton_kv_hidden_prompt_save_seconds",] += hidden_s

    def load_given_up(self, stage: Literal["admission", "loading"]) -> None:
        """Computing is cheaper than a load: it is not begun, or no longer waited for."""
        self._add(1, "baton_kv_loads_given_up", stage)

    def snapshot(self) -> tuple[dict[_Series, float], dict[_Series, Histogram]]:
        """All values and histograms now. Waits for a store's `stats`."""
        read = self._read_stats() | self._read_breakers()
        with self._lock:
            histograms = {
                series: Histogram(list(histogram.counts), histogram.total_s)
                for series, histogram in self._histograms.items()
            }
            return self._values | read, histograms

    def _read_stats(self) -> dict[_Series, float]:
        """What the store knows; what it does not know is left out."""
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
        """Those of a backend, by the name that Prometheus shall see."""
        with self._lock:
            return self._backends.setdefault(backend, TransferMetrics())

    def all(self) -> dict[str, TransferMetrics]:
        """Every backend's."""
        with self._lock:
            return dict(self._backends)
