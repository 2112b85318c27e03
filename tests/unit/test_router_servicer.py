"""A call's deadline at the router."""

import pytest

from baton.errors import DeadlineExceededError
from router.servicer import _timeout_s


class Context:
    def __init__(self, remaining):
        self._remaining = remaining

    def time_remaining(self):
        return self._remaining


@pytest.mark.parametrize(("given", "expected"), [(None, 600.0), (2.5, 2.5), (1e9, 600.0)])
def test_the_callers_time_up_to_the_longest(given, expected):
    assert _timeout_s(Context(given), 600.0) == expected


@pytest.mark.parametrize("given", [0.0, -1.0])
def test_a_passed_deadline_is_an_error(given):
    with pytest.raises(DeadlineExceededError):
        _timeout_s(Context(given), 600.0)
