"""Asks servers whether they are serving (grpc.health.v1): functions, and `baton health`."""

import argparse
import asyncio
import http.client
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import DeadlineExceededError
from rpc.channels import open_channel

__all__ = ["add_args", "check_health", "main", "wait_until_ready", "wait_until_serving"]

_POLL_INTERVAL_S = 0.1
_CHECK_TIMEOUT_S = 5.0


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `baton health`."""
    parser.add_argument("address", metavar="HOST:PORT", help="the server's address")
    parser.add_argument(
        "--service",
        default="",
        help="full name of one of its gRPC services (default: the whole server)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=_CHECK_TIMEOUT_S,
        metavar="SECONDS",
        help="longest wait for the answer (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Asks a server whether it is serving. The exit status is 0 if it is, else 1."""
    status = asyncio.run(check_health(args.address, service=args.service, timeout_s=args.timeout_s))
    sys.stdout.write(f"{status}\n")
    return 0 if status == "SERVING" else 1


async def check_health(
    address: str, *, service: str = "", timeout_s: float = _CHECK_TIMEOUT_S
) -> str:
    """Returns a server's status: "SERVING", "NOT_SERVING", or the gRPC code of a failed call.

    Args:
        address: `host:port`.
        service: full name of one of its services; empty for the whole server.
        timeout_s: longest wait for the answer.
    """
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def wait_until_ready(address: str, timeout_s: float) -> None:
    """Polls the HTTP server at `address` until it is ready to take requests.

    Raises:
        DeadlineExceededError: it is not ready after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(_is_ready, address):
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"http://{address} is not ready after {timeout_s:g} s")
        await asyncio.sleep(_POLL_INTERVAL_S)


def _is_ready(address: str) -> bool:
    # `http.client`, unlike `urllib.request`, does not ask a proxy.
    connection = http.client.HTTPConnection(address, timeout=_CHECK_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def wait_until_serving(address: str, timeout_s: float) -> None:
    """Polls the server at `address` until it is serving.

    Raises:
        DeadlineExceededError: it is not serving after `timeout_s`; the message has its last
            status.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        status = await check_health(address)
        if status == "SERVING":
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"{address} is {status} after {timeout_s:g} s")
        await asyncio.sleep(_POLL_INTERVAL_S)
