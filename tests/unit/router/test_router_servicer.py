"""The time limit of a call at the router."""

import pytest

from baton.common.errors import DeadlineExceededError
from router.servicer import _timeout_s


class FakeContext:
    def __init__(self, remaining):
        self._remaining = remaining

    def time_remaining(self):
        return self._remaining


@pytest.mark.parametrize("given", [None, 2.5])
def test_the_timeout_is_that_of_the_caller(given):
    assert _timeout_s(FakeContext(given)) == given


@pytest.mark.parametrize("given", [0.0, -1.0])
def test_a_passed_deadline_is_an_error(given):
    with pytest.raises(DeadlineExceededError):
        _timeout_s(FakeContext(given))
