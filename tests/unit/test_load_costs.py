import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_transfer.costs import LoadCosts

TOKEN_S = 0.016


class Store:
    """Loads one after the other, by a clock of its own."""

    def __init__(self, latency_s: float = 0.0, token_s: float = 0.0) -> None:
        self.costs = LoadCosts(TOKEN_S)
        self.latency_s = latency_s
        self.token_s = token_s
        self.now = 100.0
        self._num_jobs = 0

    def load(self, num_tokens: int) -> None:
        self._num_jobs += 1
        self.costs.start(self._num_jobs, num_tokens, 0, self.now)
        self.now += self.latency_s + num_tokens * self.token_s
        self.costs.end(self._num_jobs, self.now)

    def may_load(self, num_tokens: int, num_queued_tokens: int = 0) -> bool:
        return self.costs.may_load(num_tokens, num_queued_tokens, self.now)


def test_the_first_loads_are_not_judged():
    store = Store(latency_s=2.0)
    for _ in range(4):
        assert store.may_load(1)
        store.load(1)
    assert not store.may_load(1)


def test_latency_and_rate_are_told_apart():
    store = Store(latency_s=0.5, token_s=0.002)
    for num_tokens in (10, 200, 50, 100):
        store.load(num_tokens)
    assert store.costs.predict_s(20) == pytest.approx(0.54)
    assert store.costs.predict_s(1000) == pytest.approx(2.5)
    # 0.5 s of latency are not worth 20 tokens at 16 ms each, but worth 1,000.
    assert not store.may_load(20)
    assert store.may_load(1000)


def test_what_is_computed_first_counts():
    store = Store(latency_s=0.5)
    for _ in range(4):
        store.load(10)
    assert not store.may_load(10)
    assert store.may_load(10, num_queued_tokens=40)


def test_quick_loads_are_taken_however_quick_computing_is():
    store = Store(latency_s=0.04)
    store.costs = LoadCosts(0.0)
    for _ in range(4):
        store.load(10)
    assert store.may_load(10)


def test_a_load_is_tried_in_a_while_and_recovery_is_seen_at_once():
    store = Store(latency_s=2.0)
    for _ in range(10):
        store.load(10)
    store.now += 1
    assert not store.may_load(10)
    store.now += 2.1
    assert store.may_load(10)  # 5 s after the last one began
    store.load(10)
    assert not store.may_load(10)

    store.now += 3.1
    assert store.may_load(10)
    store.latency_s = 0.001
    store.load(10)
    assert store.may_load(10)
    assert store.costs.predict_s(10) == pytest.approx(0.001)


def test_only_one_load_is_tried_at_a_time():
    store = Store(latency_s=2.0)
    for _ in range(4):
        store.load(10)
    store.now += 5
    assert store.may_load(10)
    store.costs.start(99, 10, 0, store.now)
    assert not store.may_load(10)


def test_a_load_that_is_given_up_tells_that_loads_take_long():
    store = Store(latency_s=0.001)
    for _ in range(5):
        store.load(10)
    for job in range(100, 105):
        store.costs.start(job, 10, 0, store.now)
        store.costs.wait(job, store.now)
        store.now = store.costs.next_give_up
        assert store.costs.give_up(store.now) == [job]
        store.costs.end(job, store.now + 100)  # that it ends at last tells nothing more
    assert not store.may_load(10)


def test_loads_given_up_together_count_in_full_each():
    """Streams in lockstep on a store that hangs: it is left, but for a try in a while."""
    costs, now, num_tried = LoadCosts(TOKEN_S), 100.0, 0
    for _ in range(100):
        running = []
        for _ in range(50):
            if costs.may_load(8, 0, now):
                running.append(num_tried)
                costs.start(num_tried, 8, 0, now)
                costs.wait(num_tried, now)
                num_tried += 1
        now += 0.4
        assert costs.give_up(now) == running
    assert num_tried < 50 + 10, "all once, and then one in five seconds"
    assert costs.predict_s(8) == pytest.approx(0.4)


def test_patience_is_some_times_what_computing_takes():
    costs = LoadCosts(TOKEN_S)
    for job, (num_tokens, num_queued) in enumerate([(1, 0), (100, 0), (100, 100)]):
        costs.start(job, num_tokens, num_queued, now=50.0)
        assert costs.next_give_up is None, "nobody waits for it"
        costs.wait(job, now=60.0)
        patience_s = max(0.25, 3 * (num_tokens + num_queued) * TOKEN_S)
        assert costs.next_give_up == pytest.approx(60.0 + patience_s)
        assert costs.give_up(60.0 + patience_s - 0.01) == []
        assert costs.give_up(60.0 + patience_s + 0.01) == [job]
        assert costs.next_give_up is None


def test_where_nothing_may_be_computed_nothing_is_given_up():
    store = Store(latency_s=100.0)
    store.costs = LoadCosts(math.inf)
    for _ in range(10):
        store.load(10)
    assert store.may_load(10)
    store.costs.start(99, 10, 0, store.now)
    store.costs.wait(99, store.now)
    assert store.costs.next_give_up is None
    assert store.costs.give_up(1e9) == []


def test_what_a_load_took_counts_and_not_when_it_was_asked_for():
    costs = LoadCosts(TOKEN_S)
    costs.start(1, 10, 0, now=0.0)
    costs.end(1, now=5.0, seconds=0.2)
    assert costs.predict_s(10) == pytest.approx(0.2)


def test_loads_that_run_side_by_side_share_their_time():
    costs = LoadCosts(TOKEN_S)
    for job in range(8):
        costs.start(job, 10, 0, now=0.0)
    for job in range(8):
        costs.end(job, 0.1 * (job + 1))
    assert costs.predict_s(10) == pytest.approx(0.1)
    costs.start(8, 10, 0, now=1.0)
    assert costs.predict_s(10) == pytest.approx(0.2)  # behind the one that runs


def test_what_ended_otherwise_tells_nothing():
    costs = LoadCosts(TOKEN_S)
    costs.start(1, 10, 0, now=0.0)
    costs.drop(1)
    costs.end(1, 100.0)
    costs.drop(2)
    costs.wait(2, 100.0)
    assert costs.predict_s(10) == 0


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100, allow_subnormal=False)), min_size=1),
    st.integers(1, 4096),
)
def test_predictions_neither_fall_nor_pass_below_zero(loads, num_tokens):
    costs, now = LoadCosts(TOKEN_S), 0.0
    for job, (size, seconds) in enumerate(loads):
        costs.start(job, size, 0, now)
        now += seconds
        costs.end(job, now)
    assert 0 <= costs.predict_s(num_tokens) <= costs.predict_s(num_tokens + 1) + 1e-9


@given(
    st.lists(st.integers(1, 500), min_size=4, max_size=30),
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.integers(1, 500),
)
def test_a_steady_store_is_predicted_as_it_is(sizes, latency_s, token_s, num_tokens):
    store = Store(latency_s, token_s)
    store.costs = LoadCosts(1e3)  # so slow that every load is worth it
    for size in [*sizes, 1, 500]:  # of two sizes at least
        store.load(size)
    expected_s = latency_s + num_tokens * token_s
    assert store.costs.predict_s(num_tokens) == pytest.approx(expected_s, rel=1e-3, abs=1e-3)
