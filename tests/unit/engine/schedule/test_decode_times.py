"""`DecodeTimes` on a simulated device, on which a step of n tokens takes a + b * n."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.decode_times import DecodeTimes

MS = 1e-3

seconds = st.floats(0.1 * MS, 0.1)
sizes = st.integers(1, 512)


def measured(
    fixed_s: float, token_s: float, steps: Iterable[int], estimate_s: float
) -> DecodeTimes:
    times = DecodeTimes(estimate_s)
    for num_tokens in steps:
        times.record(num_tokens, fixed_s + num_tokens * token_s)
    return times


@given(seconds, seconds, st.floats(0.5, 2), st.lists(sizes, max_size=10), st.integers(8, 512))
def test_steps_of_two_sizes_tell_the_time_of_larger_ones(
    fixed_s: float, token_s: float, ratio: float, others: list[int], size: int
) -> None:
    """Whatever the estimate was: decode replicas never compute a prompt, which would correct it."""
    steps = (8, 64, *others) * 20
    times = measured(fixed_s, token_s, steps, ratio * token_s)
    assert times.step_s(size) == pytest.approx(fixed_s + size * token_s, rel=0.15)


@given(seconds, seconds, st.floats(0.2, 5), sizes, st.integers(1, 100))
def test_the_time_of_steps_of_one_size_is_right_at_once(
    fixed_s: float, token_s: float, ratio: float, size: int, count: int
) -> None:
    times = measured(fixed_s, token_s, (size,) * count, ratio * token_s)
    assert times.step_s(size) == pytest.approx(fixed_s + size * token_s)


@given(seconds, seconds, st.lists(sizes, max_size=50))
def test_a_right_estimate_stays_right(fixed_s: float, token_s: float, steps: list[int]) -> None:
    times = measured(fixed_s, token_s, steps, token_s)
    assert times.token_s == pytest.approx(token_s)
    assert times.fixed_s == pytest.approx(fixed_s if steps else 0.0)


@given(st.lists(st.tuples(sizes, st.floats(0, 10)), max_size=50), sizes)
def test_times_are_finite_and_grow_with_the_size(steps: list[tuple[int, float]], size: int) -> None:
    times = DecodeTimes(MS)
    for num_tokens, step_s in steps:
        times.record(num_tokens, step_s)
        assert times.fixed_s >= 0
        assert times.token_s >= 0
        assert 0 < times.step_s(size) <= times.step_s(2 * size) < 1e6


def test_first_steps_that_are_slow_do_not_hide_what_a_row_takes() -> None:
    times = DecodeTimes(MS)
    for num_tokens, factor in ((1, 5), (10, 3), *[(20, 1), (24, 1), (30, 1)] * 8):
        times.record(num_tokens, factor * (5 + num_tokens) * MS)
    assert times.step_s(48) > 0.7 * 53 * MS


def test_the_time_of_a_token_is_not_forgotten_while_sizes_are_equal() -> None:
    times = measured(5 * MS, 0.7 * MS, (1, 8, 48) * 8 + (48,) * 500, 0.3 * MS)
    assert times.step_s(128) == pytest.approx((5 + 128 * 0.7) * MS, rel=0.05)


def test_a_slower_device_is_followed() -> None:
    times = measured(5 * MS, 0.7 * MS, (8, 48) * 8, 0.7 * MS)
    for num_tokens in (8, 48) * 20:
        times.record(num_tokens, (10 + num_tokens * 1.4) * MS)
    assert times.step_s(128) == pytest.approx((10 + 128 * 1.4) * MS, rel=0.05)


def test_one_disturbed_step_changes_little() -> None:
    times = measured(5 * MS, MS, (8, 48) * 20, MS)
    before_s = times.step_s(48)
    times.record(48, 60.0)
    assert before_s < times.step_s(48) < 1.3 * before_s


def test_prompts_correct_the_estimate_until_steps_have_sizes() -> None:
    times = DecodeTimes(MS)
    times.expect(2 * MS)
    assert times.step_s(10) == 20 * MS
    times.record(10, 25 * MS)
    assert times.step_s(20) == pytest.approx(45 * MS)
