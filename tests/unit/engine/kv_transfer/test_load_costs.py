"""`LoadCosts`, the cost model of loads: measurements, predictions, loads given up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_transfer.costs import LoadCosts

TOKEN_S = 0.016


class FakeStore:
    """A store that loads one request after the other, with its own clock."""

    def __init__(self, latency_s: float = 0.0, token_s: float = 0.0) -> None:
        self.costs = LoadCosts(TOKEN_S)
        self.latency_s = latency_s
        self.token_s = token_s
        self.now = 100.0

    def load(self, num_tokens: int) -> None:
        load = self.costs.start(num_tokens, 0, self.now)
        self.now += self.latency_s + num_tokens * self.token_s
        self.costs.end(load, self.now)

    def may_load(self, num_tokens: int, num_queued_tokens: int = 0) -> bool:
        return self.costs.may_load(num_tokens, num_queued_tokens, self.now)


def test_the_first_loads_are_always_accepted():
    store = FakeStore(latency_s=2.0)
    for _ in range(4):
        assert store.may_load(1)
        store.load(1)
    assert not store.may_load(1)


def test_latency_and_rate_are_estimated_separately():
    store = FakeStore(latency_s=0.5, token_s=0.002)
    for num_tokens in (10, 200, 50, 100):
        store.load(num_tokens)
    assert store.costs.predict_s(20) == pytest.approx(0.54)
    assert store.costs.predict_s(1000) == pytest.approx(2.5)
    # 0.5 s of latency are not worth 20 tokens at 16 ms each, but worth 1,000.
    assert not store.may_load(20)
    assert store.may_load(1000)


def test_queued_tokens_count_as_time_to_compute():
    store = FakeStore(latency_s=0.5)
    for _ in range(4):
        store.load(10)
    assert not store.may_load(10)
    assert store.may_load(10, num_queued_tokens=40)


def test_quick_loads_are_accepted_even_if_computing_is_quicker():
    store = FakeStore(latency_s=0.04)
    store.costs = LoadCosts(0.0)
    for _ in range(4):
        store.load(10)
    assert store.may_load(10)


def test_a_slow_store_is_tried_every_five_seconds_and_recovers_at_once():
    store = FakeStore(latency_s=2.0)
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


def test_a_slow_store_is_tried_with_one_load_at_a_time():
    store = FakeStore(latency_s=2.0)
    for _ in range(4):
        store.load(10)
    store.now += 5
    assert store.may_load(10)
    store.costs.start(10, 0, store.now)
    assert not store.may_load(10)


def test_after_a_failed_probe_the_next_load_is_the_probe():
    """As while a backend is down: the first load after it must not wait for the next probe."""
    store = FakeStore(latency_s=2.0)
    for _ in range(4):
        store.load(10)
    store.now += 5
    for _ in range(3):
        assert store.may_load(10)
        store.costs.drop(store.costs.start(10, 0, store.now))
    running = store.costs.start(10, 0, store.now)
    store.costs.drop(store.costs.start(10, 0, store.now))
    assert not store.may_load(10), "another one runs"
    store.costs.drop(running)


def test_loads_given_up_count_as_slow_loads():
    store = FakeStore(latency_s=0.001)
    for _ in range(5):
        store.load(10)
    for _ in range(5):
        load = store.costs.start(10, 0, store.now)
        store.now += load.patience_s
        store.costs.give_up(load, store.now)
    assert not store.may_load(10)


def test_loads_given_up_together_count_in_full():
    """Many streams load from a store that hangs; soon they only try it every five seconds."""
    costs, now, num_tried = LoadCosts(TOKEN_S), 100.0, 0
    for _ in range(100):
        running = []
        for _ in range(50):
            if costs.may_load(8, 0, now):
                running.append(costs.start(8, 0, now))
                num_tried += 1
        now += 0.4
        for load in running:
            costs.give_up(load, now)
    assert num_tried < 50 + 10, "every stream tries once, then one load is tried every five seconds"
    assert costs.predict_s(8) == pytest.approx(0.4)


def test_patience_is_three_times_the_time_to_compute():
    costs = LoadCosts(TOKEN_S)
    for num_tokens, num_queued in [(1, 0), (100, 0), (100, 100)]:
        load = costs.start(num_tokens, num_queued, now=50.0)
        patience_s = max(0.25, 3 * (num_tokens + num_queued) * TOKEN_S)
        assert load.patience_s == pytest.approx(patience_s)


def test_loads_are_always_accepted_if_tokens_cannot_be_computed():
    store = FakeStore(latency_s=100.0)
    store.costs = LoadCosts(math.inf)
    for _ in range(10):
        store.load(10)
    assert store.may_load(10)
    assert store.costs.start(10, 0, store.now).patience_s == math.inf


def test_the_reported_duration_of_a_load_counts_rather_than_its_age():
    costs = LoadCosts(TOKEN_S)
    load = costs.start(10, 0, now=0.0)
    costs.end(load, now=5.0, seconds=0.2)
    assert costs.predict_s(10) == pytest.approx(0.2)


def test_loads_that_run_side_by_side_share_their_time():
    costs = LoadCosts(TOKEN_S)
    loads = [costs.start(10, 0, now=0.0) for _ in range(8)]
    for index, load in enumerate(loads):
        costs.end(load, 0.1 * (index + 1))
    assert costs.predict_s(10) == pytest.approx(0.1)
    costs.start(10, 0, now=1.0)
    assert costs.predict_s(10) == pytest.approx(0.2)  # waits for the load that runs


def test_a_dropped_load_does_not_change_predictions():
    costs = LoadCosts(TOKEN_S)
    before = costs.start(10, 0, now=0.0)
    costs.end(before, 0.5)
    costs.drop(costs.start(10, 0, now=1.0))
    assert costs.predict_s(10) == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100, allow_subnormal=False)), min_size=1),
    st.integers(1, 4096),
)
def test_predictions_rise_with_size_and_are_never_negative(loads, num_tokens):
    costs, now = LoadCosts(TOKEN_S), 0.0
    for size, seconds in loads:
        load = costs.start(size, 0, now)
        now += seconds
        costs.end(load, now)
    assert 0 <= costs.predict_s(num_tokens) <= costs.predict_s(num_tokens + 1) + 1e-9


@given(
    st.lists(st.integers(1, 500), min_size=4, max_size=30),
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.integers(1, 500),
)
def test_predictions_for_a_steady_store_are_exact(sizes, latency_s, token_s, num_tokens):
    store = FakeStore(latency_s, token_s)
    store.costs = LoadCosts(1e3)  # computing is so slow that every load is worth it
    for size in [*sizes, 1, 500]:  # at least two sizes
        store.load(size)
    expected_s = latency_s + num_tokens * token_s
    assert store.costs.predict_s(num_tokens) == pytest.approx(expected_s, rel=1e-3, abs=1e-3)


def test_the_speed_of_loads_is_known_for_a_minute():
    store = FakeStore(latency_s=0.1, token_s=0.001)
    assert store.costs.tokens_per_s(store.now) == 0.0
    for _ in range(4):
        store.load(100)
    assert store.costs.tokens_per_s(store.now) == pytest.approx(100 / 0.2)
    assert store.costs.tokens_per_s(store.now + 60) == pytest.approx(500)
    assert store.costs.tokens_per_s(store.now + 61) == 0.0
    instant = FakeStore()
    instant.load(100)
    assert instant.costs.tokens_per_s(instant.now) == 0.0
