"""Requests the health of servers (grpc.health.v1)."""

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import DeadlineExceededError
from rpc.channels import open_channel

__all__ = ["check_health", "wait_until_serving"]

_POLL_INTERVAL_S = 0.1
_CHECK_TIMEOUT_S = 5.0


async def check_health(address: str, *, service: str = "", timeout_s: float = 5.0) -> str:
    """Returns a server's status, "SERVING" or "NOT_SERVING", or the name of the error.

    Args:
        address: `host:port`.
        service: full name of one of its services; empty for the server.
        timeout_s: how long to wait for an answer.
    """
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def wait_until_serving(address: str, timeout_s: float) -> None:
    """Returns when the server at `address` serves.

    Raises:
        DeadlineExceededError: it does not within `timeout_s`; names its last status.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        status = await check_health(address, timeout_s=_CHECK_TIMEOUT_S)
        if status == "SERVING":
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"{address} is {status} after {timeout_s:g} s")
        await asyncio.sleep(_POLL_INTERVAL_S)
