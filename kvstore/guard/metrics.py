"""`TransferMetrics`: counters and histograms of the transfers of one backend. Pure.

Connectors count here, from any thread; `baton.common.observe.metrics_collector` exports the
values to Prometheus. To add a metric, add a `MetricInfo` to `METRICS`, a method
that counts it, and a line in docs/metrics.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Literal, TypeVar

from baton.common.observe.metrics import Histogram, MetricInfo, Metrics, Series, Snapshot
from kvstore.guard.breaker import BreakerCounts
from kvstore.jobs import cause_of
from kvstore.store import StoreStats

__all__ = ["METRICS", "BreakersOfDirections", "Direction", "KvMetrics", "TransferMetrics"]

Direction = Literal["save", "load"]

DIRECTIONS: tuple[Direction, ...] = ("save", "load")
CAUSES = ("missing", "corrupt", "unavailable", "timed_out", "cancelled", "failed")
STAGES = ("admission", "loading")

_T = TypeVar("_T")

_PER_DIRECTION = {"direction": DIRECTIONS}

BreakersOfDirections = Iterable[tuple[Direction, BreakerCounts]]
"""The state of breakers, each with the direction of the calls that it stops."""

# All have the label `backend` besides, which `KvMetrics` adds.
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


class TransferMetrics:
    """Metrics of one backend. Thread-safe; each method takes well under a microsecond.

    Attributes:
        read_stats: returns a store's statistics; None without a store.
        read_breakers: returns the state of each breaker, with the direction of the calls it stops.
    """

    def __init__(self) -> None:
        self.read_stats: Callable[[], StoreStats] | None = None
        self.read_breakers: Callable[[], BreakersOfDirections] = tuple
        self._metrics = Metrics(
            {name: info for name, info in METRICS.items() if name not in _FROM_STATS}
        )

    def called(
        self, direction: Direction, seconds: float, num_objects: int = 0, num_bytes: int = 0
    ) -> None:
        """Counts a call of the backend that has ended, and what it moved."""
        self._metrics.observe("baton_kv_call_seconds", seconds, direction)
        self._metrics.add("baton_kv_objects", num_objects, direction)
        self._metrics.add("baton_kv_bytes", num_bytes, direction)

    def job_ended(self, direction: Direction, seconds: float, error: str = "") -> None:
        """Counts a save or load that has its result.

        Args:
            direction: save or load.
            seconds: since its start.
            error: see `LoadResult`.
        """
        self._metrics.observe("baton_kv_job_seconds", seconds, direction)
        if error:
            self.failed(direction, error)

    def failed(self, direction: Direction, error: str) -> None:
        """Counts a save or load that ended incomplete; for `error` see `LoadResult`."""
        cause = cause_of(error).replace(" ", "_")
        cause = cause if cause in CAUSES else "failed"
        self._metrics.add("baton_kv_failures", 1, direction, cause)

    def skipped(self, num_objects: int) -> None:
        """Counts objects that were not saved because the backend holds them."""
        self._metrics.add("baton_kv_skipped_objects", num_objects)

    def looked_up(self, seconds: float, num_asked: int, num_found: int) -> None:
        """Counts a look-up that is answered."""
        self._metrics.observe("baton_kv_lookup_seconds", seconds)
        self._metrics.add("baton_kv_lookup_objects", num_asked)
        self._metrics.add("baton_kv_lookup_hits", num_found)

    def verify_failed(self) -> None:
        """Counts an object that is torn, changed, or another key's."""
        self._metrics.add("baton_kv_verify_failures", 1)

    def leases_renewed(self, count: int) -> None:
        """Counts renewals of leases on other processes' blocks."""
        self._metrics.add("baton_kv_lease_renewals", count)

    def leases_expired(self, count: int) -> None:
        """Counts leases on own blocks that ran out without being released."""
        self._metrics.add("baton_kv_expired_leases", count)

    def set_in_doubt(self, num_objects: int) -> None:
        """Sets the number of objects whose blocks are held, because something may write there."""
        self._metrics.set("baton_kv_objects_in_doubt", num_objects)

    def prompt_saved(self, seconds: float, hidden_s: float) -> None:
        """Counts the saves of a prompt; in `hidden_s` of their time it was still computed."""
        self._metrics.add("baton_kv_prompt_save_seconds", seconds)
        self._metrics.add("baton_kv_hidden_prompt_save_seconds", hidden_s)

    def load_given_up(self, stage: Literal["admission", "loading"]) -> None:
        """Counts a load that was not begun, or given up, because computing is cheaper."""
        self._metrics.add("baton_kv_loads_given_up", 1, stage)

    def snapshot(self) -> Snapshot:
        """Returns all values and histograms. Waits for a store's statistics."""
        read = self._read_stats() | self._read_breakers()
        values, histograms = self._metrics.snapshot()
        return Snapshot(values | read, histograms)

    def total(self, name: str, *labels: str) -> float:
        """Returns the sum of a counter's values that begin with these labels. Does not wait for a
        store's statistics.
        """
        series, values = (name, *labels), self._metrics.snapshot().values
        return sum(value for key, value in values.items() if key[: len(series)] == series)

    def _read_stats(self) -> dict[Series, float]:
        """Returns the store's statistics, without those that are None."""
        if self.read_stats is None:
            return {}
        stats = self.read_stats()
        known = {name: getattr(stats, field) for name, field in _FROM_STATS.items()}
        return {(name,): value for name, value in known.items() if value is not None}

    def _read_breakers(self) -> dict[Series, float]:
        values: Counter[Series] = Counter()
        for direction, counts in self.read_breakers():
            values["baton_kv_open_breakers", direction] += counts.num_open
            values["baton_kv_breaker_openings", direction] += counts.num_opened
        return dict(values)


class KvMetrics:
    """The `TransferMetrics` of one engine, by backend.

    Attributes:
        infos: the table of metrics, with the label `backend`.
    """

    def __init__(self) -> None:
        self.infos: Mapping[str, MetricInfo] = {
            name: info.with_label("backend") for name, info in METRICS.items()
        }
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

    def total(self, name: str, *labels: str) -> float:
        """Returns the sum of a counter over all backends; see `TransferMetrics.total`."""
        return sum(metrics.total(name, *labels) for metrics in self.all().values())

    def snapshot(self) -> Snapshot:
        """Returns the metrics of all backends. Waits for their statistics."""
        values: dict[Series, float] = {}
        histograms: dict[Series, Histogram] = {}
        for backend, metrics in self.all().items():
            numbers, measured = metrics.snapshot()
            values |= _labelled(backend, numbers)
            histograms |= _labelled(backend, measured)
        return Snapshot(values, histograms)


def _labelled(backend: str, values: Mapping[Series, _T]) -> dict[Series, _T]:
    return {(name, backend, *labels): value for (name, *labels), value in values.items()}
