"""`Silence`: frozen workers are given up soon, late ones are not."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.silence import Silence


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
