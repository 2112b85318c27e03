"""Arrival processes: ascending from 0, repeatable, at the rate and with the spread they state."""

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from benchmarks.arrivals import ArrivalProcess
from benchmarks.request import BenchRequest, Workload

RATES = st.floats(0.01, 1000)


@st.composite
def processes(draw):
    kind = draw(st.sampled_from(["burst", "constant", "poisson", "gamma", "bursts"]))
    rate = None if kind == "burst" else draw(RATES)
    burstiness = draw(st.floats(0.05, 20)) if kind == "gamma" else None
    period_s = draw(st.floats(0.01, 100)) if kind == "bursts" else None
    return ArrivalProcess(
        kind=kind,
        request_rate=rate,
        burstiness=burstiness,
        burst_period_s=period_s,
        seed=draw(st.integers(0, 9)),
    )


def times(process, count=200):
    return list(islice(process.times(), count))


@given(processes())
def test_times_ascend_from_zero_and_repeat(process):
    taken = times(process)
    assert taken[0] == 0
    assert taken == sorted(taken)
    assert taken == times(process)


@given(RATES, st.floats(0.01, 100))
def test_bursts_arrive_together_and_keep_the_rate(rate, period_s):
    process = ArrivalProcess(kind="bursts", request_rate=rate, burst_period_s=period_s)
    for index, time_s in enumerate(times(process)):
        number = round(time_s / period_s)
        assert time_s == pytest.approx(number * period_s)
        # The request's arrival time at a constant rate lies in this period.
        assert number * period_s <= index / rate * (1 + 1e-9)
        assert index / rate < (number + 1) * period_s * (1 + 1e-9)


@pytest.mark.parametrize("burstiness", [0.25, 1, 4])
def test_gamma_arrivals_have_the_stated_mean_and_spread(burstiness):
    process = ArrivalProcess(kind="gamma", request_rate=5, burstiness=burstiness)
    gaps = [late - early for early, late in pairwise(times(process, 20_000))]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    assert statistics.variance(gaps) / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_is_gamma_with_a_shape_of_one():
    poisson = ArrivalProcess(kind="poisson", request_rate=5, seed=3)
    gamma = ArrivalProcess(kind="gamma", request_rate=5, burstiness=1, seed=3)
    assert times(poisson) == times(gamma)


@given(st.integers(1, 30), st.data())
def test_only_requests_without_a_predecessor_get_arrival_times(num_requests, data):
    requests = [
        BenchRequest(
            (1,), 1, after=data.draw(st.none() | st.integers(0, index - 1)) if index else None
        )
        for index in range(num_requests)
    ]
    process = ArrivalProcess(kind="constant", request_rate=2)
    timed = process.apply(Workload("w", requests)).requests
    firsts = [r.arrival_s for r in timed if r.after is None]
    assert firsts == [index / 2 for index in range(len(firsts))]
    assert all(r.arrival_s is None for r in timed if r.after is not None)
    assert [r.after for r in timed] == [r.after for r in requests]


def test_a_trace_keeps_its_arrival_times():
    process = ArrivalProcess(kind="trace")
    timed = Workload("w", [BenchRequest((1,), 1, arrival_s=3.0)])
    assert process.apply(timed) is timed
    with pytest.raises(ConfigurationError, match="needs a workload that has times"):
        process.apply(Workload("w", [BenchRequest((1,), 1)]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "poisson"}, "--arrival poisson needs --request-rate"),
        ({"kind": "burst", "request_rate": 1}, "--request-rate is 1, but --arrival burst has none"),
        ({"kind": "constant", "request_rate": 0}, "--request-rate is 0; it must be > 0"),
        ({"kind": "gamma", "request_rate": 1}, "--arrival gamma needs --burstiness"),
        ({"kind": "now"}, "--arrival is 'now'"),
    ],
)
def test_impossible_processes_are_refused(values, message):
    with pytest.raises(ConfigurationError, match=message):
        ArrivalProcess(**values)
