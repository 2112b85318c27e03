"""The network or Redis fails during a transfer and comes back: no token is lost."""

import asyncio
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer
from tests.support.routed_cluster import running_routed_cluster
from tests.support.routes import HELD_S, open_route
from tests.support.two_hosts import running_two_hosts, why_unavailable

TIMEOUT_S = 3.0  # how long the connectors wait for an answer


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["redis", "nixl"])  # grpc's network: below
async def test_no_token_is_lost_when_the_network_fails_and_returns(
    name: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route(name, redis_server, TIMEOUT_S) as route,
        running_routed_cluster(route, tmp_path) as routed,
    ):
        await asyncio.gather(*routed.start_jobs()[1])

        # Connections are reset in the middle of a response, and new ones are refused.
        route.hold_loads()
        tasks = await routed.start_until_held()
        for path in route.paths:
            path.cut()
        await asyncio.gather(*tasks, *routed.start_jobs()[1])
        for path in route.paths:
            await path.start()
        await routed.check_recovered()

        # Traffic stops in the middle of a response, without an error at either end.
        route.hold_loads()
        tasks = await routed.start_until_held()
        for path in route.paths:
            path.hold()
        await asyncio.gather(*tasks, *routed.start_jobs()[1])
        # The delayed bytes arrive after the readers have given up.
        route.release()
        await routed.check_recovered()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_no_token_is_lost_when_redis_is_killed_during_loads_and_saves(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        open_route("redis", redis_server) as route,
        running_routed_cluster(route, tmp_path) as routed,
    ):
        await asyncio.gather(*routed.start_jobs()[1])
        for hold in (route.hold_loads, route.hold_saves):
            hold()
            tasks = await routed.start_until_held()
            await asyncio.to_thread(redis_server.kill)
            route.release()
            await asyncio.gather(*tasks, *routed.start_jobs()[1])
            await asyncio.to_thread(redis_server.start)
            await routed.check_recovered()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.parametrize("scheme", ["grpc", "nixl"])
async def test_no_token_is_lost_when_the_cable_between_two_hosts_is_unplugged(
    scheme: str, tmp_path: Path
) -> None:
    with running_two_hosts(scheme, f"timeout_s={HELD_S:g}") as hosts:
        async with running_routed_cluster(hosts, tmp_path, places=hosts.places) as routed:
            await routed.check_recovered()

            hosts.hold_loads()
            tasks = await routed.start_until_held()
            hosts.unplug()
            await asyncio.gather(*tasks, *routed.start_jobs()[1])
            hosts.release()
            await routed.check_recovered()
