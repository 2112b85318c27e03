"""Killed or paused processes and cancelled requests: right tokens or a typed error, no leak."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from baton import AsyncClient
from baton.common.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster import Cluster, running_cluster
from tests.support.jobs import ConstrainedJob, Job, retry_until_served
from tests.support.redis_server import RedisServer

LONG_TIMEOUT_S = 200.0


async def run_while(client: AsyncClient, jobs: Sequence[Job], disturb: Coroutine) -> None:
    """Runs all jobs; runs `disturb` once each job has received tokens from decode."""
    tasks = [asyncio.create_task(job.run(client)) for job in jobs]
    await asyncio.gather(*(job.has_tokens.wait() for job in jobs))
    await disturb
    await asyncio.gather(*tasks)


async def call(function: Callable[[], object]) -> None:
    await asyncio.to_thread(function)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_cancel_and_deadline_at_every_stage_free_everything(tmp_path: Path) -> None:
    jobs = [Job(seed) for seed in range(4)]
    # Long enough that none ends within the longest of the deadlines below.
    long_jobs = [Job(9, num_tokens=400) for _ in range(4)]
    async with (
        running_cluster(
            tmp_path,
            model=tiny_checkpoint("llama"),
            kv_connector=f"file://{tmp_path}/kv",
            # Small chunks and batches: a prompt takes many steps and others wait in the queue.
            worker_flags=["--max-num-batched-tokens=4", "--max-num-seqs=2"],
            router_flags=[
                "--max-local-prefill-tokens=0",
                "--resume-timeout-s=2",
                "--queue-timeout-s=2",
            ],
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        for num_yields in (0, 1, 5, 50):  # while queued, in prefill, or later
            tasks = [asyncio.create_task(job.run(client)) for job in jobs]
            for _ in range(num_yields):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.wait_pools_full()

        task = asyncio.create_task(jobs[0].run(client))
        await jobs[0].has_tokens.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.wait_pools_full()

        for timeout_s in (0.001, 0.03, 0.1):
            started = time.monotonic()
            results = await asyncio.gather(
                *(job.run(client, timeout_s) for job in long_jobs),
                return_exceptions=True,
            )
            # The router refuses at once what would probably not end in time.
            kinds = {type(result) for result in results}
            assert kinds <= {DeadlineExceededError, ResourceExhaustedError}
            assert time.monotonic() - started < timeout_s + 30
            await cluster.wait_pools_full()

        await jobs[1].run(client)
        await check_loss_of_the_only_decode(cluster, client, jobs[0])


async def check_loss_of_the_only_decode(cluster: Cluster, client: AsyncClient, job: Job) -> None:
    """Checks for a typed error without a decode replica, and for service once it is back."""
    # Long and many enough that some are still to run when the replica is killed: two of them take a
    # quarter of a second on a fast machine.
    long_jobs = [Job(0, num_tokens=400) for _ in range(40)]
    # On a busy machine a short deadline would have the router refuse the last ones of them.
    tasks = [asyncio.create_task(job.run(client, LONG_TIMEOUT_S)) for job in long_jobs]
    # Two run at a time, in any order.
    waits = [asyncio.create_task(job.has_tokens.wait()) for job in long_jobs]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await call(cluster.decode[0].kill)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = {type(result) for result in results if result is not None}
    assert errors == {UnavailableError}
    for wait in waits:
        wait.cancel()

    cluster.decode[0].start()
    await cluster.decode[0].wait_serving()
    await retry_until_served(job, client)
    await cluster.wait_pools_full()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_token_is_lost_when_replicas_are_killed(tmp_path: Path) -> None:
    jobs = [Job(seed) for seed in range(6)] + [ConstrainedJob(seed) for seed in range(3)]
    async with (
        running_cluster(
            tmp_path,
            model=tiny_checkpoint("llama"),
            kv_connector=f"file://{tmp_path}/kv",
            num_prefill=2,
            num_decode=2,
            router_flags=["--max-local-prefill-tokens=0"],
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        await run_while(client, jobs, call(cluster.decode[0].kill))
        await cluster.wait_pools_full()

        tasks = [asyncio.create_task(job.run(client)) for job in jobs]
        await call(cluster.prefill[0].kill)
        await asyncio.gather(*tasks)
        await cluster.wait_pools_full()

        await call(cluster.prefill[1].kill)  # without prefill, decode computes prompts itself
        await asyncio.gather(*(job.run(client) for job in jobs))
        await cluster.wait_pools_full()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_streams_continue_while_redis_is_paused_or_down(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    jobs = [Job(seed, num_tokens=30) for seed in range(6)]
    async with (
        running_cluster(
            tmp_path,
            model=tiny_checkpoint("llama"),
            kv_connector=f"{redis_server.url}?timeout_s=0.5",
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        for disturb, mend in (
            (redis_server.pause, redis_server.resume),
            (redis_server.kill, redis_server.start),
        ):
            await asyncio.gather(*(job.run(client) for job in jobs))
            tasks = [asyncio.create_task(job.run(client)) for job in jobs]
            await call(disturb)
            await asyncio.gather(*tasks)
            await asyncio.gather(*(job.run(client) for job in jobs))
            await call(mend)
            await asyncio.gather(*(job.run(client) for job in jobs))
            await cluster.wait_pools_full()
