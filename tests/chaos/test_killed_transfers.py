"""Either tier is killed before, during or after a transfer: no token is lost, nothing leaks."""

import asyncio
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.routed_cluster import NUM_JOBS, await_started, first_of, running_routed_cluster
from tests.support.routes import open_route


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "grpc"])  # nixl is below
async def test_no_token_is_lost_when_prefill_is_killed_around_a_transfer(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server) as route,
        running_routed_cluster(route, tmp_path) as routed,
    ):
        cluster, (prefill,) = routed.cluster, routed.cluster.prefill
        await asyncio.gather(*routed.start_jobs()[1])

        # Before: prefill has the requests and has computed nothing.
        jobs = routed.make_jobs(NUM_JOBS)  # slow, so it comes before prefill stops answering
        prefill.freeze()
        tasks = routed.start(jobs)
        await await_started(cluster, prefill, 2 * NUM_JOBS)
        assert not any(job.tokens for job in jobs)
        prefill.kill()
        await asyncio.gather(*tasks)
        await routed.check_recovered(prefill)

        # During: part of its KV has been sent.
        route.hold_saves()
        tasks = await routed.start_until_held()
        prefill.kill()
        route.release()
        await asyncio.gather(*tasks)
        await routed.check_recovered(prefill)

        # After: decode has all the KV that it needs.
        jobs, tasks = routed.start_jobs()
        for job, task in zip(jobs, tasks, strict=True):
            await first_of(task, job.has_tokens.wait())
        prefill.kill()
        await asyncio.gather(*tasks)
        await routed.check_recovered(prefill)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "nixl"])  # through a store, and from a peer
async def test_no_token_is_lost_when_decode_is_killed_during_a_load(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server) as route,
        running_routed_cluster(route, tmp_path, decode_url=route.held_decode_url) as routed,
    ):
        (decode,) = routed.cluster.decode
        await asyncio.gather(*routed.start_jobs()[1])

        route.hold_loads()
        tasks = await routed.start_until_held()
        decode.kill()
        route.release()
        decode.flags.append(f"--kv-connector={route.decode_url}")
        # The streams wait for decode and continue. Handoffs that were never loaded end with
        # their leases.
        await routed.check_recovered(decode)
        await asyncio.gather(*tasks)
        await routed.cluster.wait_pools_full(timeout_s=60)
