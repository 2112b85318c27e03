"""`Tier`: finds and connects the replicas of one tier.

Each address has one task that connects, follows the replica until it is lost, and
connects again. An address that left DNS is not tried again, but a connected replica
stays in use until it is lost, since DNS answers vary. A worker with two addresses is
used at the first one; the task of the other waits until the worker is lost there.

An address may be a replica set, which has no WorkerService. Its workers are then followed like
addresses that discovery lists. A set that cannot be reached keeps the workers that it had.

Workers change their role, so each tier follows the addresses of the other one, too. A worker that
serves in the other tier is asked again when that tier sees another role, or has lost it; one
that serves in neither, every second.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic

import grpc

from baton.common.errors import BatonError, FailedPreconditionError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.capacity import Capacity
from router.fleet.replica import Replica, ReplicaT
from router.fleet.replica_set import watch_replicas
from router.fleet.roles import serves_in, tier_name
from rpc.discovery.discovery import Discovery
from rpc.errors import from_rpc_error
from rpc.server_access import open_cluster_channel

__all__ = ["MakeReplica", "Tier"]

_LOGGER = logging.getLogger("baton.router")
_INFO_TIMEOUT_S = 5.0
_ROLE_INTERVAL_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_SETTLED_S = 2.0
"""A connection that is lost sooner does not reset the backoff: the worker may be about to end, or a
step of it hangs."""

MakeReplica = Callable[
    [str, worker_pb2.GetInfoResponse, grpc.aio.Channel, ClusterSecurity], ReplicaT
]


class Tier(Generic[ReplicaT]):
    """One tier's replicas.

    Args:
        role: the role that its replicas have, or both roles.
        discovery: the addresses at which replicas may be.
        elsewhere: addresses of the other tier; what happens there is not reported.
        find_elsewhere: returns the other tier's connected replica at an address; None without one.
        make_replica: makes a replica from its address, its description, its channel and
            `security`.
        security: what this router shows to replicas, and asks of them.
        check: raises `FailedPreconditionError` for a replica that must not be used.
        on_change: called when a replica starts or stops taking requests.
        on_forget: called with the id of a worker that restarted or left an address; another
            address or the other tier may still have it.

    Attributes:
        role: the role that its replicas have, or both roles.
        name: "prefill" or "decode".
    """

    def __init__(
        self,
        role: "worker_pb2.WorkerRole.ValueType",
        discovery: Discovery,
        elsewhere: Discovery,
        find_elsewhere: Callable[[str], Replica | None],
        make_replica: MakeReplica[ReplicaT],
        security: ClusterSecurity,
        *,
        check: Callable[[Replica], None],
        on_change: Callable[[], None],
        on_forget: Callable[[str], None],
    ) -> None:
        self.role = role
        self.name = tier_name(role)
        self._discovery = discovery
        self._elsewhere = elsewhere
        self._find_elsewhere = find_elsewhere
        self._make_replica = make_replica
        self._security = security
        self._check = check
        self._on_change = on_change
        self._on_forget = on_forget
        self._listed = asyncio.Event()  # discovery may list other addresses
        discovery.on_change(self._listed.set)
        elsewhere.on_change(self._listed.set)
        self._sets: dict[str, frozenset[str]] = {}  # the workers of each replica set
        self._own: frozenset[str] = frozenset()
        self._addresses: frozenset[str] = frozenset()
        self._connected: dict[str, ReplicaT] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    @property
    def connected(self) -> Sequence[ReplicaT]:
        """All connected replicas, whether or not they take requests."""
        return list(self._connected.values())

    def at(self, address: str) -> ReplicaT | None:
        """Returns the connected replica at an address; None without one."""
        return self._connected.get(address)

    @property
    def candidates(self) -> Sequence[ReplicaT]:
        """The replicas that take new requests. Any thread may read them, as metrics do."""
        # Of a copy: replicas come and go while another thread iterates.
        return [replica for replica in list(self._connected.values()) if replica.takes_requests]

    @property
    def capacities(self) -> frozenset[Capacity]:
        """The different capacities of the connected replicas."""
        return frozenset(replica.capacity for replica in self._connected.values())

    @property
    def problems(self) -> Mapping[str, str]:
        """Why addresses of the tier are not connected."""
        return {address: self._problems[address] for address in self._own & self._problems.keys()}

    async def run(self) -> None:
        """Keeps replicas connected until cancelled."""
        try:
            while True:
                self._listed.clear()
                self._follow_all()
                await self._listed.wait()
        finally:
            followers = list(self._followers.values())
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _follow_all(self) -> None:
        """Follows the addresses that discovery and replica sets list now."""
        self._own = self._with_replicas(self._discovery.addresses)
        self._addresses = self._own | self._with_replicas(self._elsewhere.addresses)
        for address in self._addresses - self._followers.keys():
            follower = _Follower(self.name, address, is_quiet=address not in self._own)
            self._followers[address] = asyncio.create_task(self._follow(follower))

    def _with_replicas(self, addresses: frozenset[str]) -> frozenset[str]:
        return addresses.union(*(self._sets.get(address, ()) for address in addresses))

    def _set_replicas(self, address: str, replicas: frozenset[str]) -> None:
        """Notes the workers of a replica set; none for an address that is a worker itself."""
        if replicas != self._sets.get(address, frozenset()):
            self._sets[address] = replicas
            self._follow_all()

    async def _follow(self, follower: "_Follower") -> None:
        """Connects repeatedly while the address is listed."""
        try:
            while follower.address in self._addresses:
                await self._connect_once(follower)
                await asyncio.sleep(follower.next_backoff_s())
        finally:
            del self._followers[follower.address]
            self._sets.pop(follower.address, None)
            self._problems.pop(follower.address, None)
            self._on_forget(follower.worker_id)

    async def _connect_once(self, follower: "_Follower") -> None:
        try:
            await self._connect(follower)
        except FailedPreconditionError as error:
            self._problems[follower.address] = error.message
            follower.log_refusal(error)
        except BatonError as error:
            self._problems[follower.address] = error.message
            follower.log_loss(error)
        except Exception:
            _LOGGER.exception("%s replica %s: unexpected failure", self.name, follower.address)

    async def _connect(self, follower: "_Follower") -> None:
        """Follows one connection from GetInfo to its loss.

        Returns only if the worker is in use at another address, once it is lost there, or if the
        address has left the tier.

        Raises:
            BatonError: the connection failed or was lost.
        """
        address = follower.address
        async with open_cluster_channel(address, self._security, self._name_of(address)) as channel:
            info = await self._find_worker(follower, channel)
            if info is None:
                return
            twin = self._find(info.worker_id)
            if twin is None:
                await self._use(follower, info, channel)
        if twin is not None:
            self._problems.pop(address, None)
            follower.log_standby(twin.address)
            await twin.lost.wait()

    def _name_of(self, address: str) -> str | None:
        """The DNS name of an address, or of the replica set that lists it."""
        listing = (each for each, replicas in self._sets.items() if address in replicas)
        found = next(listing, address)
        return self._discovery.name_of(found) or self._elsewhere.name_of(found)

    async def _find_worker(
        self, follower: "_Follower", channel: grpc.aio.Channel
    ) -> worker_pb2.GetInfoResponse | None:
        """Returns the description of the address's worker once it serves in this tier; None if the
        address has left first. Follows a replica set until its connection ends.

        Raises:
            BatonError: the connection failed or was lost.
        """
        while (info := await self._get_info(channel)) is not None:
            self._set_replicas(follower.address, frozenset())
            if serves_in(info.role, self.role):
                return info
            self._problems.pop(follower.address, None)
            follower.log_other_tier()
            await self._wait_for_role(follower.address, info.role)
            if follower.address not in self._addresses:
                return None
        with follower.connection():
            async for addresses in watch_replicas(follower.address, channel, self._security):
                self._problems.pop(follower.address, None)
                follower.log_replicas(len(addresses))
                self._set_replicas(follower.address, frozenset(addresses))
        return None

    async def _wait_for_role(self, address: str, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Waits until the worker may have another role than this one, of the other tier."""
        replica = self._find_elsewhere(address)
        if replica is None or replica.lost.is_set() or replica.role != role:
            await asyncio.sleep(_ROLE_INTERVAL_S)
        else:
            await replica.wait_for_role_change()

    async def _get_info(self, channel: grpc.aio.Channel) -> worker_pb2.GetInfoResponse | None:
        """Returns the description of the worker; None if the address is that of a replica set."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            return await stub.GetInfo(
                worker_pb2.GetInfoRequest(),
                timeout=_INFO_TIMEOUT_S,
                metadata=self._security.call_metadata(),
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise from_rpc_error(error) from error

    async def _use(
        self,
        follower: "_Follower",
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
    ) -> None:
        if follower.worker_id != info.worker_id:
            self._on_forget(follower.worker_id)
            follower.worker_id = info.worker_id
        replica = self._make_replica(follower.address, info, channel, self._security)
        self._check(replica)
        self._connected[follower.address] = replica
        self._problems.pop(follower.address, None)
        follower.log_connected()
        try:
            with follower.connection():
                await replica.run(self._on_change)
        except BatonError as error:
            # Not only once the channel is closed, which takes a moment.
            self._problems[follower.address] = error.message
            raise
        finally:
            del self._connected[follower.address]

    def _find(self, worker_id: str) -> ReplicaT | None:
        found = (r for r in self._connected.values() if r.replica_id == worker_id)
        return next(found, None)


class _Follower:
    """The state of an address that lasts from one connection to the next.

    One of the other tier `is_quiet`: that tier reports its losses.
    """

    def __init__(self, tier: str, address: str, *, is_quiet: bool) -> None:
        self.address = address
        self.worker_id = ""
        self._is_quiet = is_quiet
        self._tier = tier
        self._backoff_s = _FIRST_BACKOFF_S
        self._reported = ""

    def next_backoff_s(self) -> float:
        """The backoff doubles with each failure. It is random, so that routers spread out."""
        backoff_s, self._backoff_s = self._backoff_s, min(self._backoff_s * 2, _MAX_BACKOFF_S)
        return backoff_s * random.uniform(0.5, 1.0)

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Resets the backoff at the end of a block, the connection, that has lasted long enough."""
        connected_at = time.monotonic()
        try:
            yield
        finally:
            if time.monotonic() - connected_at >= _SETTLED_S:
                self._backoff_s = _FIRST_BACKOFF_S

    def log_connected(self) -> None:
        self._report(logging.INFO, "connected, worker " + self.worker_id)

    def log_replicas(self, num_replicas: int) -> None:
        level = logging.DEBUG if self._is_quiet else logging.INFO
        self._report(level, f"is a replica set; workers: {num_replicas}")

    def log_other_tier(self) -> None:
        self._report(logging.DEBUG, "serves in the other tier")

    def log_standby(self, other_address: str) -> None:
        self._report(
            logging.INFO, f"stands by: its worker is connected already, at {other_address}"
        )

    def log_refusal(self, error: BatonError) -> None:
        self._report(logging.ERROR, f"REFUSED, worker {self.worker_id}: {error.message}")

    def log_loss(self, error: BatonError) -> None:
        level = logging.DEBUG if self._is_quiet else logging.WARNING
        self._report(level, f"not connected: {error.message}")

    def _report(self, level: int, message: str) -> None:
        """Logs a message unless it repeats the last one."""
        if message != self._reported:
            self._reported = message
            _LOGGER.log(level, "%s replica %s %s", self._tier, self.address, message)
