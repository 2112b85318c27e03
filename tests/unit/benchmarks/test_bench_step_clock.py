"""`StepClock` of `baton bench engine-step`, on a clock that advances only in timed functions."""

import pytest

from benchmarks.offline.step_profile import StepClock


class FakeTime:
    def __init__(self):
        self.now_ns = 0
        self.num_settled = 0

    def spend(self, ns):
        self.now_ns += ns

    def settle(self):
        self.num_settled += 1

    def read(self):
        return self.now_ns


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture
def clock(time):
    return StepClock(time.settle, time.read)


def test_the_time_of_a_function_excludes_the_timed_functions_it_calls(clock, time):
    def draw():
        time.spend(5)
        return "token"

    draw = clock.timed("draw", draw)

    def forward():
        time.spend(100)
        draw()
        return draw()

    def step():
        time.spend(1)
        token = clock.timed("forward", forward)()
        time.spend(2)
        return token

    assert clock.timed("rest", step)() == "token"
    assert clock.take_times() == {"draw": 10, "forward": 100, "rest": 3}
    assert clock.take_times() == {}


def test_the_time_of_a_function_that_raises_counts_too(clock, time):
    def fail():
        time.spend(7)
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        clock.timed("forward", fail)()
    clock.timed("forward", time.spend)(1)
    assert clock.take_times() == {"forward": 8}


def test_the_device_is_synchronized_before_every_reading(clock, time):
    clock.timed("forward", time.spend)(1)
    assert time.num_settled == 2
