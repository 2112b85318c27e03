"""Either tier is killed before, during or after a transfer: no token is lost, nothing leaks."""

import asyncio
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.routes import open_route
from tests.support.scene import NUM_JOBS, await_started, first_of, running_scene


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "grpc"])  # nixl is below
async def test_no_token_is_lost_when_prefill_is_killed_around_a_transfer(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server) as route,
        running_scene(route, tmp_path) as scene,
    ):
        cluster, (prefill,) = scene.cluster, scene.cluster.prefill
        await asyncio.gather(*scene.start_jobs()[1])

        # Before: prefill has the requests and has computed nothing.
        jobs = scene.make_jobs(NUM_JOBS)  # slow, so it comes before prefill stops answering
        prefill.freeze()
        tasks = scene.start(jobs)
        await await_started(cluster, prefill, 2 * NUM_JOBS)
        assert not any(job.tokens for job in jobs)
        prefill.kill()
        await asyncio.gather(*tasks)
        await scene.check_recovered(prefill)

        # During: part of its KV has been sent.
        route.hold_saves()
        tasks = await scene.start_until_held()
        prefill.kill()
        route.release()
        await asyncio.gather(*tasks)
        await scene.check_recovered(prefill)

        # After: decode has all the KV that it needs.
        jobs, tasks = scene.start_jobs()
        for job, task in zip(jobs, tasks, strict=True):
            await first_of(task, job.has_tokens.wait())
        prefill.kill()
        await asyncio.gather(*tasks)
        await scene.check_recovered(prefill)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "nixl"])  # through a store, and from a peer
async def test_no_token_is_lost_when_decode_is_killed_during_a_load(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server) as route,
        running_scene(route, tmp_path, decode_url=route.held_decode_url) as scene,
    ):
        (decode,) = scene.cluster.decode
        await asyncio.gather(*scene.start_jobs()[1])

        route.hold_loads()
        tasks = await scene.start_until_held()
        decode.kill()
        route.release()
        decode.flags.append(f"--kv-connector={route.decode_url}")
        # The streams wait for decode and continue. Handoffs that were never loaded end with
        # their leases.
        await scene.check_recovered(decode)
        await asyncio.gather(*tasks)
        await scene.cluster.wait_pools_full(timeout_s=60)
