"""`Activity`: what is counted of requests, and which errors operators see."""

import pytest

from baton.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from router.observe.activity import Activity, RecentTimes
from router.observe.request_record import RequestRecord


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def record(*, tokens=11, error="", first_ms=50.0, token_ms=10.0, reasons=("stop",)):
    made = RequestRecord(
        arrived_at=0.0,
        first_token_at=first_ms / 1000,
        ended_at=(first_ms + token_ms * (tokens - 1)) / 1000,
        error=error,
        finish_reasons=list(reasons),
    )
    made.usage.completion_tokens = tokens
    return made


def fail(activity, error, request_id="r"):
    with pytest.raises(type(error)), activity.watching(request_id):
        raise error


def test_times_are_those_of_the_last_minute():
    activity = Activity(clock := Clock())
    assert RecentTimes.of(activity.first_token_ms) == RecentTimes()
    for first_ms in range(1, 101):
        activity.ended(record(first_ms=first_ms, token_ms=7.0))
    assert RecentTimes.of(activity.first_token_ms) == RecentTimes(
        100, pytest.approx(51), pytest.approx(100)
    )
    assert RecentTimes.of(activity.token_ms) == RecentTimes(100, pytest.approx(7), pytest.approx(7))
    clock.now += 61
    activity.ended(record(first_ms=5.0, tokens=1))
    assert RecentTimes.of(activity.first_token_ms) == RecentTimes(1, 5.0, 5.0)
    assert RecentTimes.of(activity.token_ms) == RecentTimes()
    assert activity.uptime_s == 61


def test_a_request_without_tokens_has_no_times():
    activity = Activity()
    made = record(reasons=[], error="UNAVAILABLE")
    made.first_token_at = None
    activity.ended(made)
    assert (
        RecentTimes.of(activity.first_token_ms).count
        == RecentTimes.of(activity.token_ms).count
        == 0
    )


def test_requests_of_batches_have_no_times():
    activity = Activity()
    made = record()
    made.is_awaited = False
    activity.ended(made)
    assert not activity.first_token_ms
    assert not activity.token_ms


def test_tokens_of_several_candidates_have_no_times_of_their_own():
    activity = Activity()
    activity.ended(record(reasons=["stop", "length"]))
    assert (
        RecentTimes.of(activity.first_token_ms).count,
        RecentTimes.of(activity.token_ms).count,
    ) == (1, 0)


def test_errors_are_kept_with_their_request_and_clients_mistakes_are_not():
    activity = Activity()
    fail(activity, UnavailableError("no decode replica is ready"), "first")
    fail(activity, InvalidArgumentError("stop is 'the secret of the prompt'; ..."))
    fail(activity, NotFoundError("model 'x' does not exist"))
    fail(activity, RuntimeError("the secret of the prompt"), "bug")
    assert activity.failed == {
        "UNAVAILABLE": 1,
        "INVALID_ARGUMENT": 1,
        "NOT_FOUND": 1,
        "INTERNAL": 1,
    }
    kept = [(error.code, error.message, error.request_id) for error in activity.errors]
    assert kept == [
        ("INTERNAL", "RuntimeError", "bug"),
        ("UNAVAILABLE", "no decode replica is ready", "first"),
    ]


def test_a_client_that_leaves_is_no_error():
    activity = Activity()
    with pytest.raises(GeneratorExit), activity.watching("r"):
        raise GeneratorExit
    assert not activity.failed


def test_errors_are_bounded():
    activity = Activity()
    for _ in range(100):
        fail(activity, UnavailableError("x" * 10_000), "y" * 10_000)
    assert len(activity.errors) == 20
    assert len(activity.errors[0].message) == 256
    assert len(activity.errors[0].request_id) == 128
