"""KV metrics: counters, histograms and their export to Prometheus."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.common.observe.metrics_collector import MetricsCollector
from kvstore.guard.breaker import Breaker
from kvstore.guard.metrics import METRICS, KvMetrics, TransferMetrics
from kvstore.store import StoreStats, StoreUnavailableError


class Exported:
    """The metrics of one backend, `redis`, as Prometheus reads them."""

    def __init__(self) -> None:
        metrics = KvMetrics()
        self.metrics = metrics.of("redis")
        self._registry = CollectorRegistry()
        self._registry.register(MetricsCollector(metrics))

    def families(self) -> dict[str, str]:
        return {family.name: family.type for family in self._parse()}

    def value(self, sample_name: str, **labels: str) -> float | None:
        """Returns the value of a sample; None if there is no such sample."""
        found = [
            sample.value
            for family in self._parse()
            for sample in family.samples
            if sample.name == sample_name and sample.labels == {"backend": "redis", **labels}
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def _parse(self):
        return list(text_string_to_metric_families(generate_latest(self._registry).decode()))


def _stats(num_objects: int | None, num_bytes: int | None) -> StoreStats:
    return StoreStats(
        puts=0,
        gets=0,
        hits=0,
        put_bytes=0,
        get_bytes=0,
        num_objects=num_objects,
        num_bytes=num_bytes,
    )


def test_exported_names_and_types_are_those_of_the_table():
    assert Exported().families() == {name: info.kind for name, info in METRICS.items()}


def test_counters_are_exported_as_zero_from_the_start():
    exported = Exported()
    assert exported.value("baton_kv_bytes_total", direction="load") == 0
    assert exported.value("baton_kv_failures_total", direction="save", cause="unavailable") == 0
    assert exported.value("baton_kv_job_seconds_count", direction="load") == 0


def test_calls_are_counted_by_direction():
    exported = Exported()
    exported.metrics.called("load", 0.003, 4, 4096)
    exported.metrics.called("load", 0.2)
    exported.metrics.called("save", 20.0, 1, 10)
    assert exported.value("baton_kv_objects_total", direction="load") == 4
    assert exported.value("baton_kv_bytes_total", direction="load") == 4096
    assert exported.value("baton_kv_bytes_total", direction="save") == 10
    assert exported.value("baton_kv_call_seconds_sum", direction="load") == pytest.approx(0.203)


def test_a_bucket_counts_times_up_to_and_including_its_bound():
    exported = Exported()
    for seconds in (0.0, 0.0025, 0.0026, 10.0, 11.0):
        exported.metrics.called("load", seconds)

    def bucket(bound: str) -> float | None:
        return exported.value("baton_kv_call_seconds_bucket", direction="load", le=bound)

    assert [bucket("0.0001"), bucket("0.0025"), bucket("0.005")] == [1, 2, 3]
    assert [bucket("10.0"), bucket("+Inf")] == [4, 5]
    assert exported.value("baton_kv_call_seconds_count", direction="load") == 5


@pytest.mark.parametrize(
    ("error", "cause"),
    [("missing", "missing"), ("timed out", "timed_out"), ("a third party's word", "failed")],
)
def test_unknown_causes_of_failures_are_counted_as_failed(error, cause):
    exported = Exported()
    exported.metrics.job_ended("load", 0.1, error)
    assert exported.value("baton_kv_failures_total", direction="load", cause=cause) == 1
    assert exported.value("baton_kv_job_seconds_count", direction="load") == 1


def test_lookups_count_keys_and_hits():
    exported = Exported()
    exported.metrics.looked_up(0.01, num_asked=5, num_found=3)
    assert exported.value("baton_kv_lookup_objects_total") == 5
    assert exported.value("baton_kv_lookup_hits_total") == 3
    assert exported.value("baton_kv_lookup_seconds_count") == 1


def test_saves_leases_doubts_and_loads_given_up_are_counted():
    exported = Exported()
    metrics = exported.metrics
    metrics.job_ended("save", 0.1)
    metrics.skipped(7)
    metrics.verify_failed()
    metrics.leases_renewed(2)
    metrics.leases_expired(3)
    metrics.set_in_doubt(4)
    metrics.prompt_saved(2.0, hidden_s=1.5)
    metrics.load_given_up("loading")
    expected = {
        "baton_kv_skipped_objects_total": 7,
        "baton_kv_verify_failures_total": 1,
        "baton_kv_lease_renewals_total": 2,
        "baton_kv_expired_leases_total": 3,
        "baton_kv_objects_in_doubt": 4,
        "baton_kv_prompt_save_seconds_total": 2.0,
        "baton_kv_hidden_prompt_save_seconds_total": 1.5,
    }
    assert {name: exported.value(name) for name in expected} == expected
    assert exported.value("baton_kv_loads_given_up_total", stage="loading") == 1
    assert exported.value("baton_kv_loads_given_up_total", stage="admission") == 0


def test_only_known_statistics_of_a_store_are_exported():
    exported = Exported()
    assert exported.value("baton_kv_stored_bytes") is None
    exported.metrics.read_stats = lambda: replace(_stats(3, None), evictions=2, oldest_age_s=5.0)
    assert exported.value("baton_kv_stored_objects") == 3
    assert exported.value("baton_kv_stored_bytes") is None
    assert exported.value("baton_kv_evictions_total") == 2
    assert exported.value("baton_kv_oldest_object_seconds") == 5


def test_breakers_are_read_at_export():
    exported = Exported()
    reads, other = Breaker("reads"), Breaker("other reads")
    exported.metrics.read_breakers = lambda: [("load", reads.counts), ("load", other.counts)]
    assert exported.value("baton_kv_open_breakers", direction="load") == 0

    with pytest.raises(StoreUnavailableError):
        reads.call(_refuse)
    assert exported.value("baton_kv_open_breakers", direction="load") == 1
    assert exported.value("baton_kv_open_breakers", direction="save") == 0
    assert exported.value("baton_kv_breaker_openings_total", direction="load") == 1


def test_each_backend_has_its_own_metrics():
    metrics = KvMetrics()
    metrics.of("shm").skipped(1)
    metrics.of("shm").skipped(1)
    metrics.of("redis")
    counts = {
        backend: one.snapshot()[0]["baton_kv_skipped_objects",]
        for backend, one in metrics.all().items()
    }
    assert counts == {"shm": 2, "redis": 0}


def test_concurrent_counting_loses_nothing():
    metrics = TransferMetrics()

    def count(_: int) -> None:
        for _ in range(5_000):
            metrics.called("save", 0.001, 1, 2)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    values, histograms = metrics.snapshot()
    assert values["baton_kv_bytes", "save"] == 40_000
    assert sum(histograms["baton_kv_call_seconds", "save"].counts) == 20_000


def _refuse() -> None:
    raise StoreUnavailableError("down")
