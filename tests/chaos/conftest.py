"""Fixtures of all tests of this folder."""

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support import cluster
from tests.support.fork_server import ForkServer


@pytest.fixture(scope="module", autouse=True)
def forked_servers(fork_server: ForkServer) -> Iterator[None]:
    """Forks the processes of clusters, which these tests kill and start again and again."""
    with mock.patch.object(cluster, "subprocess", fork_server.subprocess):
        yield
