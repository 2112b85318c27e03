"""`overlap`: the time in which transfers ran, and the part of it before a moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.groups.states import overlap

MOMENTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted).map(tuple), max_size=8)


def test_no_intervals_take_no_time():
    assert overlap([], 5.0) == (0.0, 0.0)


def test_time_in_which_several_intervals_overlap_counts_once():
    assert overlap([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)], 100.0) == (7.0, 7.0)


def test_only_time_before_the_given_moment_is_hidden():
    assert overlap([(0.0, 2.0), (3.0, 7.0), (8.0, 9.0)], 5.0) == pytest.approx((7.0, 4.0))


@given(INTERVALS, MOMENTS)
def test_overlap_equals_a_count_of_seconds(intervals, until):
    seconds = {s for start, end in intervals for s in range(start, end)}
    assert overlap(intervals, until) == (len(seconds), sum(s < until for s in seconds))
