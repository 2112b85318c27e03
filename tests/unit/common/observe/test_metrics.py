"""Metrics: counting, bounded labels, and the export that Prometheus's parser reads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.common.observe.metrics import (
    BUCKETS_S,
    MAX_OPEN_VALUES,
    OTHER,
    MetricInfo,
    Metrics,
    buckets_between,
)
from baton.common.observe.metrics_collector import MetricsCollector

TABLE = {
    "pies": MetricInfo("counter", "Pies.", {"kind": ("apple", "plum")}),
    "guests": MetricInfo("gauge", "Guests."),
    "calls": MetricInfo("counter", "Calls.", {"tenant": None, "kind": ("apple", "plum")}),
    "waits": MetricInfo("histogram", "Waits.", {"tenant": None}),
    "sizes": MetricInfo("histogram", "Sizes.", buckets=(1.0, 8.0)),
}


def exported(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_known_series_are_exported_as_zero_and_open_ones_once_used():
    samples = exported(Metrics(TABLE))
    assert samples[key("pies_total", kind="plum")] == 0
    assert samples[key("guests")] == 0
    assert samples[key("sizes_count")] == 0
    assert not any(name.startswith(("calls", "waits")) for name, _ in samples)


def test_values_are_exported_with_their_labels():
    metrics = Metrics(TABLE)
    metrics.add("pies", 2, "plum")
    metrics.add("pies", 1, "plum")
    metrics.set("guests", 7)
    metrics.add("guests", -2)
    metrics.add("calls", 1, "blue", "apple")
    samples = exported(metrics)
    assert samples[key("pies_total", kind="plum")] == 3
    assert samples[key("pies_total", kind="apple")] == 0
    assert samples[key("guests")] == 5
    assert samples[key("calls_total", tenant="blue", kind="apple")] == 1


def test_a_histogram_counts_values_up_to_and_including_its_own_bounds():
    metrics = Metrics(TABLE)
    metrics.observe("sizes", 1.0)
    metrics.observe("sizes", 2.0, count=3)
    metrics.observe("sizes", 9.0)
    samples = exported(metrics)
    assert [samples[key("sizes_bucket", le=bound)] for bound in ("1.0", "8.0", "+Inf")] == [1, 4, 5]
    assert samples[key("sizes_count")] == 5
    assert samples[key("sizes_sum")] == 16


def test_an_open_label_has_a_bounded_number_of_values_in_all_metrics_together():
    metrics = Metrics(TABLE)
    for number in range(MAX_OPEN_VALUES + 20):
        metrics.add("calls", 1, f"tenant-{number}", "plum")
    metrics.observe("waits", 0.1, "tenant-3")
    metrics.observe("waits", 0.1, "late")
    values, histograms = metrics.snapshot()
    assert len([series for series in values if series[0] == "calls"]) == MAX_OPEN_VALUES + 1
    assert values["calls", OTHER, "plum"] == 20
    assert {series[1] for series in histograms if series[0] == "waits"} == {"tenant-3", OTHER}


def test_label_values_that_need_escapes_survive_the_export():
    metrics = Metrics(TABLE)
    metrics.add("calls", 1, 'a"b\\c\nd', "plum")
    assert exported(metrics)[key("calls_total", tenant='a"b\\c\nd', kind="plum")] == 1


@pytest.mark.parametrize("series", [("cakes",), ("pies",), ("pies", "cherry"), ("guests", "plum")])
def test_a_series_that_the_table_lacks_is_an_error(series):
    name, *labels = series
    with pytest.raises(ValueError, match=labels[0] if labels == ["cherry"] else name):
        Metrics(TABLE).add(name, 1, *labels)


def test_a_snapshot_does_not_change_afterwards():
    metrics = Metrics(TABLE)
    before = metrics.snapshot()
    metrics.add("pies", 1, "plum")
    metrics.observe("sizes", 1.0)
    assert before.values["pies", "plum"] == 0
    assert sum(before.histograms["sizes",].counts) == 0


def test_concurrent_counting_loses_nothing():
    metrics = Metrics(TABLE)

    def count(_: int) -> None:
        for number in range(3_000):
            metrics.add("calls", 1, f"tenant-{number % 7}", "plum")
            metrics.observe("sizes", 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(count, range(4)))
    values, histograms = metrics.snapshot()
    assert sum(values[series] for series in values if series[0] == "calls") == 12_000
    assert histograms["sizes",].total == 12_000


def test_bounds_are_1_2_and_a_half_and_5_times_powers_of_ten():
    assert buckets_between(0.001, 0.05) == (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)
    assert (BUCKETS_S[0], BUCKETS_S[-1], len(BUCKETS_S)) == (0.0001, 10.0, 16)
