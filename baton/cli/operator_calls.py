"""Calls of operators: to a router's ClusterService and to workers, and the flags of such calls."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.cli.generate import DEFAULT_ADDRESS
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args, flag
from baton.common.security.client import ClientTls
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from baton.v1 import cluster_pb2_grpc
from rpc.channels import open_blocking_channel
from rpc.errors import from_rpc_error

__all__ = [
    "CALL_TIMEOUT_S",
    "Operator",
    "add_credential_args",
    "add_operator_args",
    "calling_router",
    "operator_channel",
]

CALL_TIMEOUT_S = 10.0

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """The flag of the cluster's credential."""

    token_file: str | None = flag(
        None,
        "file of the cluster's token, which `baton serve` prints; the variable "
        "BATON_CLUSTER_TOKEN holds a token instead",
        name="cluster-token-file",
        metavar="FILE",
        is_main=True,
    )


@dataclass(frozen=True, slots=True)
class Operator:
    """Makes calls.

    Attributes:
        stub: of the router's ClusterService.
        metadata: the credential that each call shows.
    """

    stub: cluster_pb2_grpc.ClusterServiceStub
    metadata: Metadata


def add_operator_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the router's address and of what it asks of operators."""
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    add_credential_args(parser)


def add_credential_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what a process of a cluster asks of operators."""
    add_flags(parser, _Token, "security")
    add_flags(parser, ClientTls, "security")


@contextmanager
def calling_router(args: argparse.Namespace) -> Iterator[Operator]:
    """Opens a channel to the router; errors of calls become those of `baton.common.errors`.

    Args:
        args: flags that `add_operator_args` added.

    Raises:
        ConfigurationError: a file cannot be read; names the flag.
        BatonError: a call failed.
    """
    with operator_channel(args, args.address) as (channel, metadata):
        yield Operator(cluster_pb2_grpc.ClusterServiceStub(channel), metadata)


@contextmanager
def operator_channel(
    args: argparse.Namespace, address: str
) -> Iterator[tuple[grpc.Channel, Metadata]]:
    """Opens a channel to a process of a cluster, and yields it with the credential for its calls;
    errors of calls become those of `baton.common.errors`.

    Args:
        args: flags that `add_credential_args` added.
        address: the process's `host:port`.

    Raises:
        ConfigurationError: a file cannot be read; names the flag.
        BatonError: a call failed.
    """
    tls = config_from_args(ClientTls, args)
    token_file = config_from_args(_Token, args).token_file
    if token_file is not None and not Path(token_file).is_file():
        raise ConfigurationError(f"--cluster-token-file {token_file}: there is no such file")
    security = ClusterSecurity.from_environment(CredentialsConfig(token_file=token_file))
    credentials, options = tls.channel_credentials(), tls.channel_options()
    with open_blocking_channel(address, credentials, options=options) as channel:
        try:
            yield channel, tuple(security.call_metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
