"""`baton scale`: changes the number of workers behind an address."""

import argparse

import grpc

from baton.cli.operator_calls import CALL_TIMEOUT_S, add_credential_args, operator_channel
from baton.common.errors import ConfigurationError, FailedPreconditionError
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from router.fleet.replica_set import replica_addresses
from worker.replica_set import MAX_REPLICAS

__all__ = ["add_args", "main"]

_MAX_TIMEOUT_S = 2**32 // 1000
_EXIT_UNFINISHED = 1


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="host:port of a `baton prefill` or `baton decode` with --data-parallel-size",
    )
    parser.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        required=True,
        metavar="N",
        help="the new number of workers; with 0, its routers use others or wait",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for workers that start or drain, which goes on after it "
        "(default: %(default)g)",
    )
    add_credential_args(parser)


def main(args: argparse.Namespace) -> int:
    """Starts or ends workers behind an address, and prints the address of each that serves then.

    Streams of workers that end move to others with their KV. The exit status is 1 if the timeout
    has passed.
    """
    if not 0 <= args.data_parallel_size <= MAX_REPLICAS:
        raise ConfigurationError(
            f"--data-parallel-size is {args.data_parallel_size}; it must be in [0, {MAX_REPLICAS}]"
        )
    if not 0 <= args.timeout_s < _MAX_TIMEOUT_S:
        raise ConfigurationError(
            f"--timeout-s is {args.timeout_s:g}; it must be in [0, {_MAX_TIMEOUT_S})"
        )
    response = _scale(args)
    for address in replica_addresses(args.target, response.addresses):
        print(address)
    if response.num_changing:
        print(f"{response.num_changing} workers still start or drain")
    return _EXIT_UNFINISHED if response.num_changing else 0


def _scale(args: argparse.Namespace) -> replica_set_pb2.ScaleResponse:
    request = replica_set_pb2.ScaleRequest(
        num_replicas=args.data_parallel_size, timeout_ms=round(args.timeout_s * 1000)
    )
    with operator_channel(args, args.target) as (channel, metadata):
        stub = replica_set_pb2_grpc.ReplicaSetServiceStub(channel)
        try:
            return stub.Scale(request, timeout=args.timeout_s + CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            raise FailedPreconditionError(
                f"{args.target} was not started with --data-parallel-size"
            ) from None
