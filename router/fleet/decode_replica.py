"""`DecodeReplica`: one connected worker of the decode tier."""

from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
from typing_extensions import override

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import decode_pb2_grpc, worker_pb2
from router.fleet.decode_connection import DecodeConnection
from router.fleet.replica import Replica

__all__ = ["DecodeReplica"]


class DecodeReplica(Replica):
    """A worker of the decode tier.

    Attributes:
        connection: starts requests on the replica and receives their outputs.
    """

    tier = worker_pb2.WORKER_ROLE_DECODE

    def __init__(
        self,
        address: str,
        info: worker_pb2.GetInfoResponse,
        channel: grpc.aio.Channel,
        security: ClusterSecurity,
    ) -> None:
        super().__init__(address, info, channel, security)
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self.connection = DecodeConnection(stub, address, security)

    @property
    @override
    def takes_requests(self) -> bool:
        """False as soon as the connection has broken; `lost` is set a moment later."""
        return super().takes_requests and self.connection.is_open

    def release_handoff(self, handoff_id: str) -> None:
        """Makes the replica drop the blocks of a request that has moved. Best effort."""
        self.connection.release(handoff_id)

    @override
    def _activities(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._activities(), self.connection.run()]
