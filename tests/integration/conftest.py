"""Fixtures that tests of several files share."""

import pytest


@pytest.fixture(scope="module")
def suites():
    """Runs of the public conformance suite, two at a time."""
    from tests.support.conformance_suite import Suites

    running = Suites()
    yield running
    running.close()
