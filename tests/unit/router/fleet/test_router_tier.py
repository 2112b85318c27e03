"""`Tier`: the addresses that it follows."""

import asyncio

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2
from router.fleet.tier import Tier


class ListedDiscovery:
    """Lists what the test says."""

    def __init__(self, *addresses):
        self.addresses = frozenset(addresses)
        self._listeners = []

    def on_change(self, listener):
        self._listeners.append(listener)

    def list(self, *addresses):
        self.addresses = frozenset(addresses)
        for listener in self._listeners:
            listener()

    def name_of(self, address):
        return None


async def test_addresses_are_followed_once_discovery_lists_them(monkeypatch):
    own, elsewhere = ListedDiscovery("a:1"), ListedDiscovery()
    followed, ended = [], []
    news = asyncio.Event()

    async def follow(self, follower):
        followed.append(address := follower.address)
        news.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(address)

    monkeypatch.setattr(Tier, "_follow", follow)
    tier = Tier(
        worker_pb2.WORKER_ROLE_DECODE,
        own,
        elsewhere,
        lambda *_: None,
        ClusterSecurity(),
        check=lambda _: None,
        on_change=lambda: None,
        on_forget=lambda _: None,
    )
    own.list("a:1", "b:2")  # before it runs
    running = asyncio.create_task(tier.run())
    async with asyncio.timeout(10):
        while len(followed) < 2:
            await news.wait()
            news.clear()
        elsewhere.list("c:3")
        own.list("a:1")  # b:2 left: its follower ends by itself
        while len(followed) < 3:
            await news.wait()
            news.clear()
    assert (sorted(followed), ended) == (["a:1", "b:2", "c:3"], [])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert sorted(ended) == ["a:1", "b:2", "c:3"]
