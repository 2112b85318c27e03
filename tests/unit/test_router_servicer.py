"""The time limit of a call at the router."""

import pytest

from baton.errors import DeadlineExceededError
from router.servicer import _timeout_s


class FakeContext:
    def __init__(self, remaining):
        self._remaining = remaining

    def time_remaining(self):
        return self._remaining


@pytest.mark.parametrize(("given", "expected"), [(None, 600.0), (2.5, 2.5), (1e9, 600.0)])
def test_the_timeout_is_that_of_the_caller_up_to_the_maximum(given, expected):
    assert _timeout_s(FakeContext(given), 600.0) == expected


@pytest.mark.parametrize("given", [0.0, -1.0])
def test_a_passed_deadline_is_an_error(given):
    with pytest.raises(DeadlineExceededError):
        _timeout_s(FakeContext(given), 600.0)
