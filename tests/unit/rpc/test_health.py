"""`wait_until_serving`: certificates that are replaced meanwhile."""

from unittest.mock import AsyncMock

import pytest

from baton.common.errors import ConfigurationError, DeadlineExceededError
from baton.common.security.client import ClientTls
from rpc import probe as health
from rpc.probe import wait_until_serving

PAIR_ERROR = ConfigurationError("--ssl-keyfile is not the key of --ssl-certfile")


@pytest.fixture
def answers(monkeypatch):
    """The answers to come; the last one stays."""
    found = [PAIR_ERROR, "NOT_SERVING", "SERVING"]
    monkeypatch.setattr(health, "_POLL_INTERVAL_S", 0)
    monkeypatch.setattr(health, "check_health", AsyncMock(side_effect=found))
    return found


async def test_certificates_that_do_not_fit_for_a_moment_are_read_again(answers):
    seen = [ConfigurationError("--ssl-certfile c: Unable to load PEM file")]

    def tls():
        if seen:
            raise seen.pop()
        return ClientTls()

    await wait_until_serving("127.0.0.1:1", 20, tls)
    assert health.check_health.await_count == len(answers)


async def test_certificates_that_never_fit_are_named_at_the_end(answers):
    with pytest.raises(DeadlineExceededError, match=r"not serving after 0 s: --ssl-keyfile is"):
        await wait_until_serving("127.0.0.1:1", 0)
