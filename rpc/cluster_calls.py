"""Calls between the processes of a cluster: their channels, and who may make them.

`cluster_access` closes a port to all others; `open_cluster_channel` calls such a port.
"""

from typing import Any

import grpc

from baton.common.errors import UnauthenticatedError
from baton.common.security.cluster import ClusterSecurity
from rpc.channels import open_channel
from rpc.interceptors import Authorize
from rpc.server_access import ServerAccess

__all__ = ["authorize_cluster", "cluster_access", "open_cluster_channel"]


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
