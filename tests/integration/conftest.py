"""Fixtures that tests of several files share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer


@pytest.fixture(scope="module")
def suites():
    """Runs of the public conformance suite, two at a time."""
    from tests.support.conformance_suite import Suites

    running = Suites()
    yield running
    running.close()


@pytest.fixture(scope="module")
def one_compile_process() -> Iterator[None]:
    """All engines of the module compile their grammars in one process."""
    from tests.support.shared_compiling import shared_compile_processes

    with shared_compile_processes():
        yield


@pytest.fixture
def connector_url(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> Iterator[str]:
    """The URL of a connector with this scheme, which the test names indirectly."""
    urls = {
        "memory": f"memory://{tmp_path.name}",
        "shm": f"shm://test-{tmp_path.name}?max_bytes=64MiB",
        "file": f"file://{tmp_path}/kv",
        "redis": redis_server.url,
        "grpc": "grpc://?timeout_s=20",
        "nixl": "nixl://?timeout_s=20",
    }
    yield urls[request.param]
    if request.param == "shm":
        shutil.rmtree(f"/dev/shm/baton-test-{tmp_path.name}", ignore_errors=True)
