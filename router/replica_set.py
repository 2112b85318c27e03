"""`watch_replicas`: which workers an address has that is a replica set."""

from collections.abc import AsyncIterator, Sequence

import grpc

from baton.security.cluster import ClusterSecurity
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from rpc.errors import from_rpc_error

__all__ = ["watch_replicas"]


async def watch_replicas(
    channel: grpc.aio.Channel, security: ClusterSecurity
) -> AsyncIterator[Sequence[int]]:
    """Yields the ports of the workers, now and after each change, until the set has ended.

    Args:
        channel: to the set.
        security: what this router shows to it.

    Raises:
        BatonError: the connection failed or was lost.
    """
    stub = replica_set_pb2_grpc.ReplicaSetServiceStub(channel)
    request = replica_set_pb2.WatchReplicasRequest()
    try:
        async for response in stub.WatchReplicas(request, metadata=security.call_metadata()):
            yield response.ports
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
