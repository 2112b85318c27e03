"""`ReplicaBreaker` and `Silence`: failing replicas are left alone, frozen workers are given up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.replica_health import ReplicaBreaker, Silence


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedBreaker:
    """A breaker, past its first slow start, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.breaker = ReplicaBreaker("prefill replica a:1", self.clock)
        self.wait(60)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.breaker.fail(self.breaker.begin())

    def succeed(self) -> None:
        self.breaker.succeed(self.breaker.begin())

    def cooldown_s(self) -> float:
        """Returns after how many seconds, in halves, the breaker lets a request through."""
        start = self.clock.now
        while self.breaker.is_open:
            self.wait(0.5)
        return self.clock.now - start


def test_three_failures_in_a_row_open_it():
    timed = TimedBreaker()
    timed.fail(2)
    timed.succeed()
    timed.fail(2)
    assert not timed.breaker.is_open
    timed.fail(1)
    assert timed.breaker.is_open
    assert timed.cooldown_s() == 1


def test_after_a_cooldown_one_request_passes_and_its_failure_doubles_the_next_cooldown():
    timed = TimedBreaker()
    timed.fail(3)
    cooldowns = []
    for _ in range(7):
        cooldowns.append(timed.cooldown_s())
        assert timed.breaker.weight == 1  # the probe is not held back
        probe = timed.breaker.begin()
        assert timed.breaker.is_open
        timed.breaker.fail(probe)
    assert cooldowns == [1, 2, 4, 8, 16, 30, 30]


def test_a_probe_that_ends_without_a_result_is_followed_by_another():
    timed = TimedBreaker()
    timed.fail(3)
    timed.cooldown_s()
    timed.breaker.begin()  # for example, its client leaves
    assert timed.cooldown_s() == 1


def test_requests_that_began_before_it_opened_do_not_count():
    timed = TimedBreaker()
    old = [timed.breaker.begin() for _ in range(20)]
    timed.fail(3)
    for call in old[:10]:
        timed.breaker.fail(call)
    assert timed.cooldown_s() == 1
    probe = timed.breaker.begin()
    for call in old[10:]:
        timed.breaker.fail(call)
        timed.breaker.succeed(call)
    assert timed.breaker.is_open
    timed.breaker.fail(probe)
    assert timed.cooldown_s() == 2


def test_streams_that_began_before_the_failures_do_not_hide_them():
    timed = TimedBreaker()
    streams = [timed.breaker.begin() for _ in range(3)]
    for call in streams:
        timed.fail(1)
        timed.breaker.succeed(call)
    assert timed.breaker.is_open


def test_a_success_closes_it_and_begins_a_slow_start(caplog):
    timed = TimedBreaker()
    with caplog.at_level("INFO"):
        timed.fail(3)
        timed.cooldown_s()
        timed.succeed()
        timed.succeed()
    assert not timed.breaker.is_open
    assert timed.breaker.weight == 0.1
    timed.wait(10)
    assert timed.breaker.weight == 1
    assert [record.getMessage() for record in caplog.records] == [
        "prefill replica a:1 is ejected: 3 calls in a row have failed",
        "prefill replica a:1 is used again, with a slow start",
    ]
    timed.fail(3)
    assert timed.cooldown_s() == 1


def test_a_success_of_a_replica_that_is_not_ejected_does_not_slow_it():
    timed = TimedBreaker()
    timed.fail(2)
    timed.succeed()
    assert timed.breaker.weight == 1


@pytest.mark.parametrize(("age_s", "weight"), [(0, 0.1), (1.9, 0.1), (5, 0.5), (9.9, 0.9), (10, 1)])
def test_the_weight_of_a_new_replica_grows_with_its_age(age_s, weight):
    clock = Clock()
    breaker = ReplicaBreaker("decode replica a:1", clock)
    clock.now += age_s
    assert breaker.weight == weight


@given(st.lists(st.floats(0, 3), max_size=20))
def test_the_weight_never_falls_while_calls_succeed(pauses):
    clock = Clock()
    breaker = ReplicaBreaker("decode replica a:1", clock)
    weights = []
    for pause in pauses:
        clock.now += pause
        breaker.succeed(breaker.begin())
        weights.append(breaker.weight)
    assert weights == sorted(weights)
    assert all(0.1 <= weight <= 1 for weight in weights)


def reported(gaps, start=0.0):
    """A worker that has reported after each of these gaps, and the time of its last report."""
    now = start
    silence = Silence(now)
    silence.report(now)
    for gap in gaps:
        now += gap
        assert not silence.is_too_long(now), gap
        silence.report(now)
    return silence, now


def test_a_worker_that_reported_in_time_is_given_up_soon():
    silence, now = reported([0.25] * 20)
    assert not silence.is_too_long(now + 1.2)
    assert silence.is_too_long(now + 1.3)


def test_a_worker_whose_reports_were_late_gets_more_time_for_a_while():
    silence, now = reported([0.25, 0.95])
    assert not silence.is_too_long(now + 3.9)
    assert silence.is_too_long(now + 4.2)
    for _ in range(400):
        now += 0.25
        silence.report(now)
    assert silence.is_too_long(now + 1.4)


def test_the_first_report_may_take_long_but_not_for_ever():
    silence = Silence(5.0)
    assert not silence.is_too_long(14.9)
    assert silence.is_too_long(15.1)


def test_a_pause_of_this_process_is_not_the_workers():
    silence, now = reported([0.25] * 5)
    now += 60
    silence.excuse(59.9, now)
    assert not silence.is_too_long(now)
    assert silence.is_too_long(now + 1.3)


@given(st.lists(st.floats(0.0, 0.45), max_size=50), st.floats(0, 1e6))
def test_no_worker_is_kept_for_longer_than_the_longest_limit(gaps, start):
    silence, now = reported(gaps, start)
    assert silence.limit_s <= 10
    assert silence.is_too_long(now + 10.01)
    silence.excuse(100, now)
    assert not silence.is_too_long(now)
