"""Fixtures that tests of several files share."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import pytest

from engine.kv_transfer.costs import LoadCosts
from engine.runtime.ranks import started_ranks
from tests.support import cluster, rank_hosts
from tests.support.fork_server import ForkServer
from tests.support.kv_urls import fresh_shm_name
from tests.support.redis_server import RedisServer
from tests.support.shared_compiling import SharedCompileProcesses


@pytest.fixture(scope="session")
def compile_processes() -> Iterator[SharedCompileProcesses]:
    """Compile processes of grammars, which start when they are first needed."""
    with closing(SharedCompileProcesses()) as processes:
        yield processes


@pytest.fixture(scope="module", autouse=True)
def one_compile_process(compile_processes: SharedCompileProcesses) -> Iterator[None]:
    """Engines share compile processes. Tests of these override it."""
    with compile_processes.used():
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_processes(fork_server: ForkServer) -> Iterator[None]:
    """Forks the processes of ranks and of clusters. Tests of their real start override it."""
    with ExitStack() as patches:
        for module in (started_ranks, rank_hosts, cluster):
            patches.enter_context(mock.patch.object(module, "subprocess", fork_server.subprocess))
        yield


@pytest.fixture(scope="module")
def suites():
    """Runs of the public conformance suite, several at a time."""
    from tests.support.conformance_suite import Suites

    running = Suites()
    yield running
    running.close()


@pytest.fixture(scope="module")
def loads_are_worth_it() -> Iterator[None]:
    """Makes engines of this process try every load and wait for it, even on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadCosts, "of", lambda config, costs: LoadCosts(math.inf))
        yield


@pytest.fixture
def connector_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a connector with this scheme, which the test names indirectly."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        yield f"{server.url}?timeout_s=20"
        return
    # Other processes of pytest have folders of the same names.
    with fresh_shm_name() as shm_name:
        urls = {
            "memory": f"memory://{tmp_path.name}?timeout_s=20",
            "shm": f"shm://{shm_name}?max_bytes=64MiB&timeout_s=20",
            "file": f"file://{tmp_path}/kv?timeout_s=20",
            "grpc": "grpc://?timeout_s=20",
            "nixl": "nixl://?timeout_s=20",
        }
        yield urls[request.param]
