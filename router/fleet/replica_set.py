"""Which workers an address has that is a replica set."""

from collections.abc import AsyncIterator, Iterable, Sequence

import grpc

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from rpc.errors import from_rpc_error

__all__ = ["replica_addresses", "watch_replicas"]


async def watch_replicas(
    address: str, channel: grpc.aio.Channel, security: ClusterSecurity
) -> AsyncIterator[Sequence[str]]:
    """Yields the addresses of the workers, now and after each change, until the set has ended.

    Args:
        address: of the set.
        channel: to the set.
        security: what this router shows to it.

    Raises:
        BatonError: the connection failed or was lost.
    """
    stub = replica_set_pb2_grpc.ReplicaSetServiceStub(channel)
    request = replica_set_pb2.WatchReplicasRequest()
    try:
        async for response in stub.WatchReplicas(request, metadata=security.call_metadata()):
            yield replica_addresses(address, response.addresses)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def replica_addresses(address: str, listed: Iterable[str]) -> Sequence[str]:
    """Returns the addresses of a set's workers.

    Args:
        address: of the set.
        listed: what the set lists, which may leave out its own host.
    """
    host = address.rpartition(":")[0]
    return [host + each if each.startswith(":") else each for each in listed]
