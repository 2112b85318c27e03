"""A router, one worker per tier, and a route between the tiers that a test can block."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton import AsyncClient
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster import (
    HERE,
    Cluster,
    Place,
    ServerProcess,
    read_metrics,
    running_cluster,
)
from tests.support.jobs import Job, retry_until_served
from tests.support.routes import Route

__all__ = [
    "DEADLINE_S",
    "NUM_JOBS",
    "RoutedCluster",
    "await_started",
    "first_of",
    "running_routed_cluster",
]

DEADLINE_S = 150.0  # for streams that wait for a process to restart
NUM_JOBS = 3
_NUM_TOKENS = 30
_NUM_PROMPT_TOKENS = 100


@dataclass
class RoutedCluster:
    """A cluster, a client of its router, and the route of KV between its tiers."""

    cluster: Cluster
    client: AsyncClient
    route: Route
    seeds: itertools.count = field(default_factory=lambda: itertools.count(100))

    def make_jobs(self, count: int) -> list[Job]:
        """Returns jobs with new prompts."""
        return [
            Job(next(self.seeds), _NUM_TOKENS, num_prompt_tokens=_NUM_PROMPT_TOKENS)
            for _ in range(count)
        ]

    def start_jobs(self, count: int = NUM_JOBS) -> tuple[list[Job], list[asyncio.Task[None]]]:
        """Makes jobs and starts their streams."""
        jobs = self.make_jobs(count)
        return jobs, self.start(jobs)

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Task[None]]:
        """Starts the streams of existing jobs."""
        return [asyncio.create_task(job.run(self.client, DEADLINE_S)) for job in jobs]

    async def start_until_held(self) -> list[asyncio.Task[None]]:
        """Starts streams until the KV of one is blocked.

        This may take several streams: an engine that has found loads slower than computing loads
        only now and then.
        """
        tasks = []
        give_up_at = time.monotonic() + DEADLINE_S
        while not await self.route.is_holding(self.cluster):
            assert time.monotonic() < give_up_at, "no transfer is blocked"
            (job,), (task,) = self.start_jobs(1)
            tasks.append(task)
            await first_of(task, job.has_first_token.wait())
            await first_of(task, asyncio.sleep(1))
        return tasks

    async def check_recovered(self, *restarted: ServerProcess) -> None:
        """Restarts servers, and checks that KV is loaded again and that no block leaks."""
        for server in restarted:
            await server.restart()
        (job,) = self.make_jobs(1)
        await retry_until_served(job, self.client)  # until the router has found it
        before = await _num_loaded(self.cluster.decode[0])
        give_up_at = time.monotonic() + DEADLINE_S
        while await _num_loaded(self.cluster.decode[0]) == before:
            assert time.monotonic() < give_up_at, "KV is no longer loaded"
            await asyncio.gather(*self.start_jobs(2)[1])
        await self.cluster.wait_pools_full(timeout_s=60)


async def first_of(task: asyncio.Task[None], other: Any) -> None:
    """Waits until a stream has ended or failed, or `other` is done."""
    waiting = asyncio.ensure_future(other)
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def await_started(cluster: Cluster, worker: ServerProcess, count: int) -> None:
    """Waits until the router has sent a worker `count` requests."""
    give_up_at = time.monotonic() + DEADLINE_S
    while cluster.router.log().count(f"replica={worker.address}\n") < count:
        assert time.monotonic() < give_up_at, "the router sends the worker no requests"
        await asyncio.sleep(0.02)


async def _num_loaded(server: ServerProcess) -> int:
    """Returns the KV blocks that a worker has loaded since its start."""
    text = await read_metrics(server)
    pattern = r'^baton_kv_objects_total\{.*direction="load".*\} (\S+)'
    return int(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


@asynccontextmanager
async def running_routed_cluster(
    route: Route,
    folder: Path,
    *,
    decode_url: str = "",
    decode_flags: Sequence[str] = (),
    places: Mapping[str, Place] | None = None,
) -> AsyncIterator[RoutedCluster]:
    """A running cluster whose tiers meet over a route.

    Args:
        route: the route of the KV between the tiers.
        folder: the folder for logs.
        decode_url: connector URL of the decode tier; the route's by default.
        decode_flags: further flags of the decode tier.
        places: where the processes of each tier run.
    """
    host = (places or {}).get("decode", HERE).host
    flags = ["--max-local-prefill-tokens=0", "--resume-timeout-s=90", "--log-level=debug"]
    async with (
        running_cluster(
            folder,
            model=tiny_checkpoint("llama"),
            kv_connector=decode_url or route.decode_url,
            prefill_flags=[f"--kv-connector={route.prefill_url}"],
            decode_flags=["--metrics-port=0", f"--metrics-host={host}", *decode_flags],
            router_flags=flags,
            places=places,
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        yield RoutedCluster(cluster, client, route)
