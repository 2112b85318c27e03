"""`ServerAccess`: who may call a server, and its bounds; the calls between a cluster's processes.

`cluster_access` closes a port to all others; `open_cluster_channel` calls such a port.
"""

from dataclasses import dataclass
from typing import Any

import grpc

from baton.common.errors import UnauthenticatedError
from baton.common.security.cluster import ClusterSecurity
from rpc.channels import MAX_MESSAGE_BYTES, open_channel
from rpc.interceptors import Authorize, CountCall

__all__ = [
    "ConnectionAge",
    "ServerAccess",
    "authorize_cluster",
    "cluster_access",
    "open_cluster_channel",
]

_MAX_OPTION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConnectionAge:
    """The time that a connection may last. At its age the server asks the client to make its next
    calls on another one, for which the client looks up the server's name again.

    Attributes:
        age_s: seconds from its start, to within a tenth.
        grace_s: seconds from then on in which the calls under way may end.
    """

    age_s: float
    grace_s: float

    @property
    def options(self) -> dict[str, int]:
        """Options of a gRPC server."""
        return {
            "grpc.max_connection_age_ms": _milliseconds(self.age_s),
            "grpc.max_connection_age_grace_ms": _milliseconds(self.grace_s),
        }


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1000), _MAX_OPTION))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """The callers that a server admits, its limits, and the encryption of its port.

    Attributes:
        authorize: finds out who calls; None lets all callers in.
        count_call: called when a call ends, unless it polls; None counts none.
        credentials: those of the port; None for plain text.
        max_concurrent_calls: further calls get RESOURCE_EXHAUSTED before they are read, health
            and reflection apart; None for no limit.
        max_message_bytes: the most bytes of a message that a caller sends.
        max_connections: further ones are closed at once; None: as many as open files allow, but
            at most `rpc.process_limits.MAX_CONNECTIONS`.
        send_timeout_s: a call whose client reads nothing for so long ends; None for no limit.
        connection_age: after which a connection ends; None for no limit.
        shares_port: whether other processes may listen at the port too. Each connection is then
            one of theirs, as the kernel chooses.
    """

    authorize: Authorize | None = None
    count_call: CountCall | None = None
    credentials: grpc.ServerCredentials | None = None
    max_concurrent_calls: int | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_connections: int | None = None
    send_timeout_s: float | None = None
    connection_age: ConnectionAge | None = None
    shares_port: bool = False


def cluster_access(security: ClusterSecurity, host: str) -> ServerAccess:
    """Returns the callers that a worker admits: the processes of its cluster.

    Args:
        security: what they show.
        host: the address on which the worker listens.

    Raises:
        ConfigurationError: others could reach the address, and nothing is asked of them.
    """
    security.check_host("--host", host)
    return ServerAccess(
        authorize=authorize_cluster(security), credentials=security.server_credentials()
    )


def authorize_cluster(security: ClusterSecurity) -> Authorize:
    """Returns an `Authorize` that lets in processes of the cluster alone."""

    def authorize(method: str, context: Any) -> None:
        if not security.admits(context.invocation_metadata() or (), context.auth_context()):
            raise UnauthenticatedError("the call lacks a valid credential of this cluster")

    return authorize


def open_cluster_channel(
    target: str, security: ClusterSecurity, host: str | None = None
) -> grpc.aio.Channel:
    """Opens a channel to another process of the cluster, with its certificates as they are now.
    Calls need `security.call_metadata()`.

    Args:
        target: `host:port`.
        security: what this process shows, and what it asks of the other.
        host: the name by which the process was found, which its certificate must have; None if
            that is the target's.
    """
    return open_channel(
        target,
        security.channel_credentials(),
        options=security.channel_options(host),
    )
