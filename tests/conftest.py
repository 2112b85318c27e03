"""Fixtures that tests of several kinds share."""

import pytest

from tests.support.redis_server import running_redis_server


@pytest.fixture
def redis_server():
    """A real redis-server on a free port; see `tests.support.redis_server.RedisServer`."""
    with running_redis_server() as server:
        yield server
