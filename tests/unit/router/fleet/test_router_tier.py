"""`Tier`: replicas stay connected while discovery fails."""

import asyncio

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.config.discovery import Discovery
from router.fleet.tier import Tier


class FailingDiscovery:
    """Lists one address at the first look-up, and fails at the next two."""

    is_static = False

    def __init__(self):
        self.num_calls = 0
        self.recovered = asyncio.Event()

    async def addresses(self):
        self.num_calls += 1
        if self.num_calls in (2, 3):
            raise RuntimeError("the resolver is broken")
        if self.num_calls == 4:
            self.recovered.set()
        return frozenset({"a:1"})

    def name_of(self, address):
        return None


async def test_a_failure_of_discovery_ends_no_follower(monkeypatch, caplog):
    discovery = FailingDiscovery()
    followed, ended = [], []

    async def follow(self, follower):
        followed.append(address := follower.address)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(address)

    monkeypatch.setattr(Tier, "_follow", follow)
    tier = Tier(
        worker_pb2.WORKER_ROLE_DECODE,
        discovery,
        Discovery(()),
        lambda *_: None,
        ClusterSecurity(),
        check=lambda _: None,
        on_change=lambda: None,
        on_forget=lambda _: None,
        dns_interval_s=0.0,
    )
    running = asyncio.create_task(tier.run())
    async with asyncio.timeout(10):
        await asyncio.wait(
            (running, recovered := asyncio.create_task(discovery.recovered.wait())),
            return_when=asyncio.FIRST_COMPLETED,
        )
    assert recovered.done()
    assert (followed, ended) == (["a:1"], [])
    assert caplog.text.count("unexpected failure of discovery") == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert ended == ["a:1"]
