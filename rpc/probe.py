"""Asks servers whether they are serving (grpc.health.v1): functions, and `baton health`."""

import argparse
import asyncio
import http.client
import socket
import ssl
import sys
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.common.errors import ConfigurationError, DeadlineExceededError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.client import ClientTls
from rpc.channels import open_channel

__all__ = [
    "add_args",
    "check_health",
    "main",
    "wait_until_listening",
    "wait_until_ready",
    "wait_until_serving",
    "wait_until_silent",
]

_POLL_INTERVAL_S = 0.1
_CHECK_TIMEOUT_S = 5.0
_TICKS_OF_SILENCE = 10
_PLAIN = ClientTls()


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
    add_flags(parser, ClientTls, "security")


def main(args: argparse.Namespace) -> int:
    """Asks a server whether it is serving. The exit status is 0 if it is, else 1."""
    tls = config_from_args(ClientTls, args)
    status = asyncio.run(
        check_health(args.address, service=args.service, timeout_s=args.timeout_s, tls=tls)
    )
    sys.stdout.write(f"{status}\n")
    return 0 if status == "SERVING" else 1


async def check_health(
    address: str,
    *,
    service: str = "",
    timeout_s: float = _CHECK_TIMEOUT_S,
    tls: ClientTls = _PLAIN,
) -> str:
    """Returns a server's status: "SERVING", "NOT_SERVING", or the gRPC code of a failed call.

    Args:
        address: `host:port`.
        service: full name of one of its services; empty for the whole server.
        timeout_s: longest wait for the answer.
        tls: how the server is verified.

    Raises:
        ConfigurationError: a file of `tls` is bad; names the flag.
    """
    credentials, options = tls.channel_credentials(), tls.channel_options()
    async with open_channel(address, credentials, options=options) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def wait_until_listening(address: str, timeout_s: float) -> None:
    """Polls `address` until a server listens there.

    Raises:
        DeadlineExceededError: none listens after `timeout_s`.
    """
    await _poll(lambda: _is_listening(address), timeout_s, f"{address} is not open")


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CHECK_TIMEOUT_S):
            return True
    except OSError:
        return False


async def _poll(check: Callable[[], bool], timeout_s: float, failure: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(check):
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"{failure} after {timeout_s:g} s")
        await asyncio.sleep(_POLL_INTERVAL_S)


async def wait_until_ready(address: str, timeout_s: float, tls: ClientTls = _PLAIN) -> None:
    """Polls the HTTP server at `address` until it is ready to take requests.

    Raises:
        DeadlineExceededError: it is not ready after `timeout_s`.
    """
    context = tls.http_context()
    await _poll(lambda: _is_ready(address, context), timeout_s, f"{address} is not ready")


def _is_ready(address: str, context: ssl.SSLContext | None) -> bool:
    # `http.client`, unlike `urllib.request`, does not ask a proxy.
    connection = (
        http.client.HTTPConnection(address, timeout=_CHECK_TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(address, timeout=_CHECK_TIMEOUT_S, context=context)
    )
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def wait_until_serving(
    address: str, timeout_s: float, tls: Callable[[], ClientTls] = ClientTls
) -> None:
    """Polls the server at `address` until it is serving.

    Files of certificates may be bad for a moment, while they are replaced.

    Args:
        address: `host:port`.
        timeout_s: longest wait.
        tls: returns how the server is verified; called for each poll.

    Raises:
        DeadlineExceededError: it is not serving after `timeout_s`; the message has its last
            status, or why a file is bad.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status = await check_health(address, tls=tls())
        except ConfigurationError as error:
            status = error.message
        if status == "SERVING":
            return
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"{address} is not serving after {timeout_s:g} s: {status}")
        await asyncio.sleep(_POLL_INTERVAL_S)


async def wait_until_silent(address: str, silence_s: float) -> None:
    """Asks a server again and again; returns when it has not answered for long, as its event loop
    or its whole process stands still.

    An answer may be as late as that: a busy server is not silent. Time in which this process does
    not run either, as on a machine that sleeps, counts as a tenth of the silence at most.

    Args:
        address: `host:port`, or any other gRPC target.
        silence_s: time without an answer.
    """
    tick_s, num_silent = silence_s / _TICKS_OF_SILENCE, 0
    answer: asyncio.Task[bool] | None = None
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            while num_silent < _TICKS_OF_SILENCE:
                answer = answer or asyncio.create_task(_has_answered(stub, silence_s))
                await asyncio.sleep(tick_s)
                num_silent += 1
                if answer.done():
                    num_silent = 0 if answer.result() else num_silent
                    answer = None
        finally:
            if answer is not None:
                answer.cancel()
                await asyncio.wait({answer})


async def _has_answered(stub: "health_pb2_grpc.HealthStub", timeout_s: float) -> bool:
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return True
