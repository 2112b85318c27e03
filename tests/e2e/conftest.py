"""Clusters for the tests that only read and generate."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster import Cluster, running_cluster
from tests.support.containers import ComposeProject, NoContainersError, container_engine
from tests.support.http_cluster import HttpCluster, running_http_cluster

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


# Clusters end with the tests of this folder: idle ones would take time from all later tests.
@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A router with one prefill and one decode replica; tests must not stop any of them."""
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(
        folder,
        model=tiny_checkpoint("llama"),
        kv_connector=f"file://{folder}/kv",
        # A slow load is not given up for computing: the tests count loads.
        worker_flags=["--metrics-port=0", "--kv-load-failure-policy=fail"],
        router_flags=[
            "--max-local-prefill-tokens=0",
            f"--chat-template={CHAT_TEMPLATE}",
            "--tool-call-parser=hermes",
        ],
        http=True,
    ) as cluster:
        yield cluster
        assert [worker.stop() for worker in cluster.workers] == [0, 0]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def http_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    """The demo model behind HTTP, and clients; tests must not stop any of the processes."""
    async with running_http_cluster(tmp_path_factory.mktemp("http")) as cluster:
        yield cluster
        await cluster.cluster.wait_pools_full()


@pytest.fixture(scope="session")
def open_project(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., ComposeProject]]:
    """Makes projects without containers, whose image is built."""
    try:
        with container_engine() as variables:
            folder: Path = tmp_path_factory.mktemp("containers")
            opened = functools.partial(ComposeProject, folder, variables)
            opened().build()
            yield opened
    except NoContainersError as error:
        pytest.skip(str(error))
