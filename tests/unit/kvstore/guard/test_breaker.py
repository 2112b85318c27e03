"""`Breaker`: probes, growing cool-downs, one log line per change of state."""

import logging

import pytest

from kvstore.guard.breaker import Breaker, NotAskedError, log_level_of
from kvstore.store import StoreFullError, StoreUnavailableError


class FakeBackend:
    """A backend that is down or up, behind a breaker whose jitter `draw` determines."""

    def __init__(self, draw=lambda: 0.0):
        self.now = 0.0
        self.is_down = True
        self.error = StoreUnavailableError("no answer")
        self.num_calls = 0
        self.breaker = Breaker("the backend", clock=lambda: self.now, draw=draw)

    def ask(self):
        return self.breaker.call(self._answer)

    def _answer(self):
        self.num_calls += 1
        if self.is_down:
            raise self.error
        return "answer"

    def fail(self):
        with pytest.raises(StoreUnavailableError):
            self.ask()

    def cooldown_s(self):
        """Fails calls until the breaker lets one through; returns the seconds until then."""
        start, before = self.now, self.num_calls
        while self.num_calls == before:
            self.now += 0.125
            self.fail()
        return self.now - start


def test_the_cooldown_grows_to_eight_seconds_while_probes_fail():
    backend = FakeBackend()
    backend.fail()
    assert [backend.cooldown_s() for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_a_backend_that_fails_again_soon_is_left_alone_for_longer():
    """Otherwise one whose probes succeed and whose calls fail would cost a timeout each second."""
    backend = FakeBackend()
    cooldowns = []
    for _ in range(4):
        backend.fail()
        cooldowns.append(backend.breaker.due_in_s)
        backend.now += backend.breaker.due_in_s
        backend.breaker.probe(lambda: None)
    assert cooldowns == [1, 2, 4, 8]


def test_no_call_waits_for_a_backend_that_is_probed_apart_from_calls():
    backend = FakeBackend()
    backend.breaker.probes_with_calls = False
    backend.fail()
    backend.now += 100
    for _ in range(3):
        backend.fail()
    assert backend.num_calls == 1
    with pytest.raises(StoreUnavailableError, match="no answer"):
        backend.breaker.probe(backend._answer)
    with pytest.raises(NotAskedError):
        backend.breaker.probe(backend._answer)
    assert backend.num_calls == 2, "the next probe is not due yet"
    backend.is_down = False
    backend.now += 100
    assert backend.breaker.probe(backend._answer) == backend.ask() == "answer"


def test_a_full_backend_is_probed_with_calls_in_any_case():
    backend = FakeBackend()
    backend.breaker.probes_with_calls = False
    backend.error = StoreFullError("no room")
    backend.fail()
    backend.now += 0.125
    backend.is_down = False
    assert backend.ask() == "answer"


def test_a_full_backend_is_asked_again_soon_and_logged_seldom(caplog):
    backend = FakeBackend()
    backend.error = StoreFullError("no room")
    backend.fail()
    assert [backend.cooldown_s() for _ in range(3)] == [0.125] * 3  # in steps of an eighth
    backend.is_down = False
    backend.now += 0.125
    assert backend.ask() == "answer"

    backend.is_down = True
    backend.fail()
    assert len(caplog.records) == 1
    backend.now += 30
    backend.fail()
    assert len(caplog.records) == 2
    assert log_level_of(backend.error) == logging.DEBUG


def test_a_full_backend_that_does_not_answer_any_more_is_left_alone():
    backend = FakeBackend()
    backend.error = StoreFullError("no room")
    backend.fail()
    backend.error = StoreUnavailableError("no answer")
    assert [backend.cooldown_s() for _ in range(3)] == [0.125, 1, 2]


def test_a_cooldown_is_shortened_by_a_fifth_at_most():
    backend = FakeBackend(draw=lambda: 1.0)
    backend.fail()
    assert [backend.cooldown_s() for _ in range(2)] == [pytest.approx(0.8, abs=0.125), 1.625]


def test_a_successful_probe_closes_the_breaker_and_resets_the_cooldown():
    backend = FakeBackend()
    backend.fail()
    for _ in range(4):
        backend.cooldown_s()
    backend.now, backend.is_down = 1000.0, False
    assert [backend.ask() for _ in range(3)] == ["answer"] * 3
    assert not backend.breaker.is_open

    backend.is_down = True
    backend.now += 20.0
    backend.fail()
    assert backend.breaker.is_open
    assert backend.cooldown_s() == 1
    assert backend.breaker.num_opened == 2


def test_an_outage_logs_two_lines(caplog):
    backend = FakeBackend()
    with caplog.at_level(logging.INFO, "baton.kvstore"):
        for _ in range(4):
            backend.fail()
            backend.cooldown_s()
        backend.now, backend.is_down = 1000.0, False
        backend.ask()
        backend.ask()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.messages[0].startswith("the backend cannot be used: no answer. ")
    assert "the backend answers again" in caplog.text


def test_failures_that_the_breaker_has_logged_are_logged_at_debug_level():
    backend = FakeBackend()
    with pytest.raises(StoreUnavailableError) as failed:
        backend.ask()
    with pytest.raises(NotAskedError) as spared:
        backend.ask()
    levels = [log_level_of(caught.value) for caught in (failed, spared)]
    assert levels == [logging.DEBUG, logging.DEBUG]
    assert log_level_of(StoreUnavailableError("of no breaker")) == logging.WARNING


def test_the_failure_of_a_call_in_flight_does_not_count_again():
    backend = FakeBackend()

    def fail_after_another():
        backend.fail()
        raise StoreUnavailableError("late")

    with pytest.raises(StoreUnavailableError, match="late"):
        backend.breaker.call(fail_after_another)
    assert backend.breaker.num_opened == 1
    assert backend.cooldown_s() == 1


def test_any_successful_call_closes_the_breaker():
    """A call that began before the breaker opened counts as much as a probe."""
    backend = FakeBackend()
    backend.breaker.call(backend.fail)
    assert not backend.breaker.is_open


def test_an_interrupted_probe_is_followed_by_another():
    backend = FakeBackend()
    backend.fail()
    backend.now = 2.0

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.breaker.call(interrupt)
    backend.now, backend.is_down = 10.0, False
    assert backend.ask() == "answer"
