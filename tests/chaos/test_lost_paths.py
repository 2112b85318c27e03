"""The network, or Redis, goes in the midst of a transfer and comes back: no token is lost."""

import asyncio
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.routes import HELD_S, open_route
from tests.support.scene import running_scene
from tests.support.two_hosts import running_two_hosts, why_not

TIMEOUT_S = 3.0  # of the connectors: what does not answer is waited for so long


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "grpc", "nixl"])
async def test_the_path_is_lost_and_comes_back(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server, TIMEOUT_S) as route,
        running_scene(route, tmp_path) as scene,
    ):
        await asyncio.gather(*scene.start_jobs()[1])

        # Connections are reset in the midst of an answer, and no new ones taken.
        route.hold_loads()
        tasks = await scene.start_until_held()
        for path in route.paths:
            path.cut()
        await asyncio.gather(*tasks, *scene.start_jobs()[1])
        for path in route.paths:
            await path.start()
        await scene.check_recovered()

        # Nothing passes any more, in the midst of an answer, and nobody is told.
        route.hold_loads()
        tasks = await scene.start_until_held()
        for path in route.paths:
            path.hold()
        await asyncio.gather(*tasks, *scene.start_jobs()[1])
        # What was on its way comes late, when nobody waits for it any more.
        route.release()
        await scene.check_recovered()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_redis_is_killed_while_its_objects_are_read(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route("redis", redis_server) as route,
        running_scene(route, tmp_path) as scene,
    ):
        await asyncio.gather(*scene.start_jobs()[1])
        for hold in (route.hold_loads, route.hold_saves):
            hold()
            tasks = await scene.start_until_held()
            await asyncio.to_thread(redis_server.kill)
            route.release()
            await asyncio.gather(*tasks, *scene.start_jobs()[1])
            await asyncio.to_thread(redis_server.start)
            await scene.check_recovered()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("scheme", ["grpc", "nixl"])
async def test_a_cable_is_unplugged_between_two_hosts(scheme: str, tmp_path: Path) -> None:
    with running_two_hosts(scheme, f"timeout_s={HELD_S:g}") as hosts:
        async with running_scene(hosts, tmp_path, places=hosts.places) as scene:
            await scene.check_recovered()

            hosts.hold_loads()
            tasks = await scene.start_until_held()
            hosts.unplug()
            await asyncio.gather(*tasks, *scene.start_jobs()[1])
            hosts.release()
            await scene.check_recovered()
