"""`ReplicaSet`: workers behind one address, whose number changes; and its gRPC service."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import override

from baton.common.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from rpc.server import Service

__all__ = ["MAX_REPLICAS", "MakeReplica", "ReplicaSet", "ReplicaSetServicer", "WorkerReplica"]

MAX_REPLICAS = 256

_LOGGER = logging.getLogger("baton.worker")
_DEFAULT_SCALE_TIMEOUT_MS = 600_000


class WorkerReplica(Protocol):
    """One worker of a set. It is started again when it dies."""

    @property
    def address(self) -> str:
        """`host:port` of its gRPC server, or `:port` on the host of the set; known once it has
        started.
        """

    async def start(self, on_move: Callable[[], None]) -> None:
        """Starts the worker; returns when it is serving.

        Args:
            on_move: called when the address has changed, as the worker was started again.

        Raises:
            BatonError: it could not start.
        """

    async def stop(self) -> None:
        """Drains the worker and ends its process."""

    def kill(self) -> None:
        """Ends the process at once. Called after `stop`."""


@dataclass(slots=True, eq=False)
class _Member:
    """A replica's state: it starts, then serves, until it is removed.

    Attributes:
        number: the lowest one that no other replica had when this one was made.
        replica: the worker.
        is_serving: whether it has started.
        starting: the task that starts it.
        error: why it could not start; None if it has started or still starts.
    """

    number: int
    replica: WorkerReplica
    is_serving: bool = False
    error: Exception | None = None
    starting: "asyncio.Task[None]" = field(init=False)


MakeReplica = Callable[[int, Collection[str]], WorkerReplica]
"""Makes the replica with a number, at none of the addresses, which others have."""


class ReplicaSet(Service):
    """Starts and ends replicas.

    Args:
        make_replica: makes a replica.
    """

    def __init__(self, make_replica: MakeReplica) -> None:
        self._make_replica = make_replica
        self._members: list[_Member] = []  # the oldest first
        self._ending: dict[_Member, asyncio.Task[None]] = {}
        self._is_draining = False
        self._changed = asyncio.Event()

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of the replicas that have started and are to stay."""
        return [member.replica.address for member in self._members if member.is_serving]

    @property
    def num_changing(self) -> int:
        """How many replicas start or drain."""
        return len(self._members) - len(self.addresses) + len(self._ending)

    async def scale(self, num_replicas: int) -> None:
        """Starts replicas, or drains and ends the youngest ones; returns when that is done.

        The change continues if the caller is cancelled.

        Raises:
            BatonError: a replica could not start. The others are not affected.
            UnavailableError: the set has begun to drain.
        """
        if self._is_draining:
            raise UnavailableError("the workers of this address are ending")
        self._resize(num_replicas)
        await self._settle()

    async def watch(self) -> AsyncIterator[Sequence[str]]:
        """Yields `addresses`: now and after each change, until the set has drained."""
        sent = None
        while True:
            # All are read at one moment, so that a change while the caller runs is not missed.
            changed, addresses = self._changed, self.addresses
            has_ended = self._is_draining and not self._ending
            if addresses != sent:
                yield addresses
                sent = addresses
            if has_ended:
                return
            await changed.wait()

    @override
    async def drain(self, timeout_s: float) -> None:
        """Ends all replicas. They have this time limit themselves."""
        self._end_all()
        await self._settle()

    @override
    async def close(self) -> None:
        """Kills the replicas that have not ended."""
        self._end_all()
        await asyncio.sleep(0)  # so that `stop` is called before `kill`
        for member in self._ending:
            member.replica.kill()
        await self._settle()

    def _end_all(self) -> None:
        """Begins to end all replicas and refuses new ones."""
        self._is_draining = True
        self._resize(0)
        self._notify()  # also if there are none

    def _resize(self, num_replicas: int) -> None:
        """Begins to start or to end replicas."""
        while len(self._members) < num_replicas:
            self._add()
        while len(self._members) > num_replicas:
            member = self._members[-1]
            member.starting.cancel()
            self._remove(member)

    async def _settle(self) -> None:
        """Waits for the replicas that start or end.

        Raises:
            BatonError: a replica could not start.
        """
        members = list(self._members)
        changes = [*(member.starting for member in members), *self._ending.values()]
        if changes:
            await asyncio.wait(changes)
        for member in members:
            if member.error is not None:
                raise member.error

    def _add(self) -> None:
        others = [*self._members, *self._ending]
        number = min(set(range(len(others) + 1)) - {other.number for other in others})
        addresses = [other.replica.address for other in others]
        member = _Member(number, self._make_replica(number, addresses))
        member.starting = asyncio.create_task(self._start(member))
        self._members.append(member)

    async def _start(self, member: _Member) -> None:
        try:
            await member.replica.start(self._notify)
        except Exception as error:
            is_bug = not isinstance(error, BatonError)
            _LOGGER.error("replica %d: %s", member.number, error, exc_info=is_bug)
            member.error = error
            self._remove(member)
        else:
            member.is_serving = True
            self._notify()

    def _remove(self, member: _Member) -> None:
        """Makes watchers forget a replica, then ends it."""
        self._members.remove(member)
        self._ending[member] = asyncio.create_task(self._end(member))
        self._notify()

    async def _end(self, member: _Member) -> None:
        try:
            await member.replica.stop()
        finally:
            del self._ending[member]
            self._notify()

    def _notify(self) -> None:
        """Wakes all watchers. Each change has an event of its own, so no watcher misses one."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class ReplicaSetServicer(replica_set_pb2_grpc.ReplicaSetServiceServicer):
    """Lists and scales a set; `protos/baton/v1/replica_set.proto` documents the methods.

    Args:
        replicas: the set.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    @override
    async def WatchReplicas(
        self, request: replica_set_pb2.WatchReplicasRequest, context: Any
    ) -> AsyncIterator[replica_set_pb2.WatchReplicasResponse]:
        """Streams the addresses of the workers."""
        async for addresses in self._replicas.watch():
            yield replica_set_pb2.WatchReplicasResponse(addresses=addresses)

    @override
    async def Scale(
        self, request: replica_set_pb2.ScaleRequest, context: Any
    ) -> replica_set_pb2.ScaleResponse:
        """Starts or ends workers."""
        has_number, number = request.HasField("num_replicas"), request.num_replicas
        if not has_number or number > MAX_REPLICAS:
            value = number if has_number else None
            raise InvalidArgumentError.for_field("num_replicas", value, f"in [0, {MAX_REPLICAS}]")
        is_set = request.HasField("timeout_ms")
        timeout_ms = request.timeout_ms if is_set else _DEFAULT_SCALE_TIMEOUT_MS
        _LOGGER.info("scaling num_replicas=%d", number)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._replicas.scale(number)
        except TimeoutError:
            _LOGGER.warning("scaling takes longer than timeout_ms=%d", timeout_ms)
        return replica_set_pb2.ScaleResponse(
            addresses=self._replicas.addresses, num_changing=self._replicas.num_changing
        )
