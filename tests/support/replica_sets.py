"""Replica sets in this process: replicas that tests control, and fake workers as replicas."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from rpc.server import RpcServer
from rpc.server_access import cluster_access
from rpc.server_config import ServerConfig
from tests.support.fake_workers import FakeDecode
from tests.support.ports import reserved_port
from worker.replica_set import ReplicaSet, ReplicaSetServicer, WorkerReplica

SERVICE_NAME = replica_set_pb2.DESCRIPTOR.services_by_name["ReplicaSetService"].full_name


class HeldReplica(WorkerReplica):
    """Starts and stops when the test lets it.

    Attributes:
        calls: names of the methods called.
        refusal: why it cannot start; None if it can.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._address = f":{1000 + number}"
        self.calls: list[str] = []
        self.refusal: Exception | None = None
        self.may_start, self.may_end = asyncio.Event(), asyncio.Event()

    @property
    def address(self) -> str:
        return self._address

    def move(self, address: str) -> None:
        """Changes the address."""
        self._address = address
        self._on_move()

    async def start(self, on_move: Callable[[], None]) -> None:
        self._on_move = on_move
        self.calls.append("start")
        await self.may_start.wait()
        if self.refusal is not None:
            raise self.refusal

    async def stop(self) -> None:
        self.calls.append("stop")
        await self.may_end.wait()

    def kill(self) -> None:
        self.calls.append("kill")
        self.may_end.set()


class FakeReplica(WorkerReplica):
    """A fake decode worker, whose server ends at once when it stops."""

    def __init__(self, worker: FakeDecode) -> None:
        self.worker = worker
        self._address = ""

    @property
    def address(self) -> str:
        return self._address or f":{self.worker.port}"

    def move(self, worker: FakeDecode) -> None:
        """Is another worker from now on, listed with its host."""
        self.worker, self._address = worker, worker.address
        self._on_move()

    async def start(self, on_move: Callable[[], None]) -> None:
        self._on_move = on_move
        await self.worker.start()

    async def stop(self) -> None:
        await self.worker.stop()

    def kill(self) -> None:
        pass


class FakeSet:
    """A replica set of fake decode workers, on a server that the test can stop and start.

    Attributes:
        made: all replicas that it has ever made.
        workers: their workers.
        port: of its server; the same after each start.
    """

    def __init__(self, script: list[int], security: ClusterSecurity | None = None) -> None:
        self.made: list[FakeReplica] = []
        self.workers: list[FakeDecode] = []
        self.port = reserved_port()
        self._script = script
        self._security = security or ClusterSecurity()
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _make(self, number: int, taken: Collection[str]) -> WorkerReplica:
        worker = FakeDecode(self._script, security=self._security)
        self.workers.append(worker)
        self.made.append(replica := FakeReplica(worker))
        return replica

    async def start(self, num_replicas: int) -> None:
        """Starts the server, and a new set behind it."""
        self.replicas = ReplicaSet(self._make)
        access = cluster_access(self._security, "127.0.0.1")
        self._server = RpcServer(ServerConfig(port=self.port), (SERVICE_NAME,), access)
        self._server.add_servicer(
            replica_set_pb2_grpc.add_ReplicaSetServiceServicer_to_server,
            ReplicaSetServicer(self.replicas),
        )
        await self.replicas.scale(num_replicas)
        await self._server.listen()
        self._server.set_serving(True)

    async def stop_server(self) -> None:
        """Ends the server; its workers stay."""
        assert self._server is not None
        await self._server.stop(0)

    async def close(self) -> None:
        await self.stop_server()
        for worker in self.workers:
            await worker.stop()


@asynccontextmanager
async def running_set(
    script: list[int], num_replicas: int, security: ClusterSecurity | None = None
) -> AsyncIterator[FakeSet]:
    replica_set = FakeSet(script, security)
    await replica_set.start(num_replicas)
    try:
        yield replica_set
    finally:
        await replica_set.close()
