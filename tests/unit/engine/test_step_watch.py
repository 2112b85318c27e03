"""`StepWatch`: hanging steps are noticed, slow ones are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_watch import StepWatch


class Clock:
    """A clock and a total of waits for turns, which the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wait_s = 0.0

    def watch(self, prompt_token_s: float = 0.001) -> StepWatch:
        return StepWatch(lambda: self.now, prompt_token_s, lambda: self.wait_s)

    def step(self, watch: StepWatch, seconds: float, num_tokens: int) -> None:
        """Runs a step; checks that it raises no alarm."""
        watch.begin()
        watch.compute(num_tokens)
        self.now += seconds
        assert not watch.is_stalled
        watch.end()


def test_between_steps_nothing_is_stalled():
    clock = Clock()
    watch = clock.watch()
    clock.step(watch, 0.1, 4)
    clock.now += 1000
    assert watch.elapsed_s() == 0
    assert not watch.is_stalled


def test_a_step_of_a_known_size_is_stalled_soon():
    clock = Clock()
    watch = clock.watch()
    for _ in range(50):
        clock.step(watch, 0.02, 5)
    watch.begin()
    watch.compute(6)
    clock.now += 1.1
    assert watch.is_stalled


def test_the_first_step_of_a_size_may_take_long():
    clock = Clock()
    watch = clock.watch()
    clock.step(watch, 9.0, 5)
    clock.step(watch, 9.0, 500)
    slow = clock.watch(prompt_token_s=0.01)
    clock.step(slow, 300.0, 4096)


def test_a_first_step_that_compiles_is_forgotten():
    clock = Clock()
    watch = clock.watch()
    clock.step(watch, 9.0, 5)
    for _ in range(60):
        clock.step(watch, 0.02, 5)
    assert watch.limit_s() == 10.0  # between steps
    watch.begin()
    watch.compute(5)
    assert watch.limit_s() == 1.0


def test_the_wait_for_a_turn_is_not_the_steps_time():
    clock = Clock()
    watch = clock.watch()
    clock.step(watch, 0.02, 5)
    watch.begin()
    watch.compute(5)
    clock.now += 30
    clock.wait_s += 29.5
    assert not watch.is_stalled
    assert watch.elapsed_s() == pytest.approx(0.5)
    watch.end()


def test_time_in_which_the_process_did_not_run_is_not_the_steps():
    clock = Clock()
    watch = clock.watch()
    clock.step(watch, 0.02, 5)
    watch.begin()
    watch.compute(5)
    clock.now += 3
    watch.excuse(1.5)
    watch.excuse(1.0)
    assert not watch.is_stalled
    assert watch.elapsed_s() == pytest.approx(0.5)
    clock.now += 1
    assert watch.is_stalled
    watch.end()
    watch.begin()
    watch.compute(5)
    clock.now += 8.1
    assert watch.is_stalled  # the excuse was the other step's


def test_a_step_without_tokens_may_not_last_for_ever():
    clock = Clock()
    watch = clock.watch()
    watch.begin()
    clock.now += 10.1
    assert watch.is_stalled


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 8)), max_size=40))
def test_a_step_that_hung_does_not_hide_the_next_one(steps):
    clock = Clock()
    watch = clock.watch()
    for seconds, num_tokens in steps:
        clock.step(watch, min(seconds, 1.0), num_tokens)
    watch.begin()
    watch.compute(4)
    clock.now += 1000
    assert watch.is_stalled
    watch.end()
    watch.begin()
    watch.compute(4)
    clock.now += 8 * 10.0 + 0.1
    assert watch.is_stalled


def test_the_tokens_of_a_step_are_computed_while_it_runs():
    clock = Clock()
    watch = clock.watch()
    assert watch.num_computed(0.01) == 0
    watch.begin()
    watch.compute(500)
    clock.now += 2.0
    clock.wait_s += 1.0  # for its turn
    assert watch.num_computed(0.01) == 100
    assert watch.num_computed(0.001) == 500, "no more than it has"
    assert watch.num_computed(0.0) == 0, "its speed is not known"
    watch.end()
    assert watch.num_computed(0.01) == 0
