"""`Tier`: the addresses that it follows."""

import asyncio

from baton.common.errors import FailedPreconditionError
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
        lambda _: None,
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


class ReplicaElsewhere:
    """A replica of the prefill tier, whose role the test changes."""

    role = worker_pb2.WORKER_ROLE_PREFILL

    def __init__(self):
        self.lost = asyncio.Event()
        self.is_watched = asyncio.Event()
        self.has_changed = asyncio.Event()

    async def wait_for_role_change(self):
        self.is_watched.set()
        await self.has_changed.wait()


async def test_a_worker_of_the_other_tier_is_asked_again_only_when_its_role_changes(monkeypatch):
    replica, made = ReplicaElsewhere(), asyncio.Event()
    answers = []

    async def get_info(self, channel):
        answers.append(worker_pb2.GetInfoResponse(worker_id="w", role=replica.role))
        return answers[-1]

    def make_replica(address, info, channel, security):
        made.set()
        raise FailedPreconditionError("not connected in this test")

    monkeypatch.setattr(Tier, "_get_info", get_info)
    tier = Tier(
        worker_pb2.WORKER_ROLE_DECODE,
        ListedDiscovery(),
        ListedDiscovery("a:1"),
        lambda address: replica,
        make_replica,
        ClusterSecurity(),
        check=lambda _: None,
        on_change=lambda: None,
        on_forget=lambda _: None,
    )
    running = asyncio.create_task(tier.run())
    async with asyncio.timeout(10):
        await replica.is_watched.wait()
        assert [answer.role for answer in answers] == [worker_pb2.WORKER_ROLE_PREFILL]
        replica.role = worker_pb2.WORKER_ROLE_DECODE
        replica.has_changed.set()
        await made.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert answers[1].role == worker_pb2.WORKER_ROLE_DECODE
