"""A call's deadline on the server."""

import time

import pytest

from baton.errors import DeadlineExceededError
from rpc.deadlines import deadline_of, remaining_s


class Context:
    def __init__(self, remaining):
        self._remaining = remaining

    def time_remaining(self):
        return self._remaining


@pytest.mark.parametrize(("given", "expected"), [(None, 600.0), (2.5, 2.5), (1e9, 600.0)])
def test_the_callers_time_up_to_the_longest(given, expected):
    assert remaining_s(Context(given), 600.0) == expected
    before = time.monotonic()
    assert before + expected <= deadline_of(Context(given), 600.0) <= time.monotonic() + expected


@pytest.mark.parametrize("given", [0.0, -1.0])
def test_a_passed_deadline_is_an_error(given):
    with pytest.raises(DeadlineExceededError):
        remaining_s(Context(given))
