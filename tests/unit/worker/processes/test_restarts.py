"""The delays before restarts, on a clock of the test."""

import pytest

from tests.support.clock import Clock
from worker.processes.supervisor import RestartDelays, RestartPolicy


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def delays(clock):
    return RestartDelays(RestartPolicy(), clock)


def test_the_delay_of_a_process_that_dies_before_it_serves_doubles(delays):
    lengths = [delays.next_s(has_served=False) for _ in range(7)]
    assert lengths == [0.5, 1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize("interval_s", [3, 12, 3600])
def test_a_process_that_served_starts_again_at_once(delays, clock, interval_s):
    lengths = []
    for _ in range(100):
        clock.now += interval_s
        lengths.append(delays.next_s(has_served=True))
    assert set(lengths) == {0}


def test_restarts_of_a_process_that_served_have_a_rate(delays, clock):
    """Such as one whose first request kills it."""
    num_restarts = 0
    begin = clock.now
    while clock.now < begin + 600:
        clock.now += 0.01 + delays.next_s(has_served=True)
        num_restarts += 1
    assert num_restarts == pytest.approx(5 + 600 / 2, abs=2)


def test_a_quiet_time_is_worth_five_restarts(delays, clock):
    clock.now += 3600
    assert [delays.next_s(has_served=True) for _ in range(7)] == [0, 0, 0, 0, 0, 2, 4]


def test_a_start_that_succeeds_ends_the_delays_of_those_that_failed(delays):
    failed = [delays.next_s(has_served=False) for _ in range(4)]
    assert delays.next_s(has_served=True) == 0
    assert [delays.next_s(has_served=False) for _ in range(4)] == failed
