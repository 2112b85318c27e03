"""Figures of `baton bench`, compared with figures computed by hand."""

import pytest

from baton.common.errors import ConfigurationError
from benchmarks.metrics import ServiceLevel, compute_metrics, parse_service_level, peak_concurrency
from benchmarks.request import MeasuredRequest

# Sent at 1 s; tokens after 0.1, 0.2, 0.2 (one message of two) and 0.5 s; ends after 0.6 s.
FAST = MeasuredRequest(10, 1.0, [1.1, 1.2, 1.2, 1.5], 1.6)
# Sent at 1.5 s; tokens after 0.3 and 1.3 s; ends with the last token.
SLOW = MeasuredRequest(20, 1.5, [1.8, 2.8], 2.8)
# One token and no gap.
SINGLE = MeasuredRequest(5, 1.6, [1.8], 1.8)
LOST = MeasuredRequest(100, 1.0, [1.2], 3.0, error="UNAVAILABLE")


def test_latencies_of_two_requests():
    metrics = compute_metrics([FAST, SLOW], None)
    ttft, tpot, e2el = metrics.ttft_ms, metrics.tpot_ms, metrics.e2el_ms
    assert (ttft.mean, ttft.p50) == pytest.approx((200, 200))
    assert (ttft.p90, ttft.p99) == pytest.approx((280, 298))  # between 100 and 300
    assert tpot.mean == pytest.approx((400 / 3 + 1000) / 2)
    assert e2el.mean == pytest.approx((600 + 1300) / 2)
    # Gaps: 100, 0 (the same message), 300 and 1000.
    assert metrics.itl_ms.mean == pytest.approx(350)
    assert metrics.itl_ms.p50 == pytest.approx(200)
    assert metrics.itl_ms.p99_to_p50 == pytest.approx(979 / 200)
    assert metrics.goodput is None


def test_throughput_counts_tokens_over_the_whole_duration():
    metrics = compute_metrics([FAST, SLOW], None)
    assert metrics.duration_s == pytest.approx(1.8)
    assert (metrics.num_input_tokens, metrics.num_output_tokens) == (30, 6)
    assert metrics.requests_per_s == pytest.approx(2 / 1.8)
    assert metrics.input_tokens_per_s == pytest.approx(30 / 1.8)
    assert metrics.output_tokens_per_s == pytest.approx(6 / 1.8)
    assert metrics.total_tokens_per_s == pytest.approx(36 / 1.8)
    assert metrics.mean_concurrency == pytest.approx((0.6 + 1.3) / 1.8)
    assert metrics.peak_concurrency == 2


def test_failures_count_toward_duration_and_errors_but_not_latencies():
    metrics = compute_metrics([FAST, LOST], ServiceLevel())
    assert (metrics.num_requests, metrics.num_failed) == (2, 1)
    assert metrics.errors == {"UNAVAILABLE": 1}
    assert metrics.num_output_tokens == 4
    assert metrics.duration_s == pytest.approx(2.0)
    assert metrics.ttft_ms.mean == pytest.approx(100)
    assert (metrics.goodput.num_good, metrics.goodput.share) == (1, 0.5)


def test_a_run_with_only_failures_has_no_latencies():
    metrics = compute_metrics([LOST], ServiceLevel(ttft_ms=1e9))
    assert metrics.ttft_ms is metrics.itl_ms is metrics.tpot_ms is metrics.e2el_ms is None
    assert metrics.requests_per_s == metrics.goodput.share == 0


def test_a_single_token_has_no_gap():
    metrics = compute_metrics([SINGLE], ServiceLevel(tpot_ms=1))
    assert metrics.itl_ms is metrics.tpot_ms is None
    assert metrics.goodput.num_good == 1


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        (["ttft:100.1"], 1),
        (["ttft:99.9"], 0),
        (["ttft:301"], 2),
        (["ttft:301", "tpot:133.4"], 1),
        (["ttft:301", "tpot:133.3"], 0),
        (["e2el:601"], 1),
        (["e2el:1301", "tpot:1001", "ttft:301"], 2),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits, num_good):
    goodput = compute_metrics([FAST, SLOW], parse_service_level(limits)).goodput
    assert goodput.num_good == num_good
    assert goodput.share == num_good / 2
    assert goodput.requests_per_s == pytest.approx(num_good / 1.8)


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:", "tpot:-1", "tpot:nan", "e2el:inf"])
def test_impossible_limits_are_refused(text):
    with pytest.raises(ConfigurationError, match=f"--goodput has '{text}'"):
        parse_service_level([text])


def test_a_service_level_prints_as_it_is_parsed():
    assert str(parse_service_level(["tpot:50", "ttft:500.5"])) == "ttft:500.5 tpot:50"


def test_a_request_that_starts_as_another_ends_does_not_raise_the_peak():
    records = [MeasuredRequest(1, 0.0, [], 1.0), MeasuredRequest(1, 1.0, [], 2.0)]
    assert peak_concurrency(records) == 1
    assert peak_concurrency([*records, MeasuredRequest(1, 0.5, [], 1.5)]) == 2
