"""Calls of a router's gRPC methods with any bytes, by a channel or without one."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from baton.v1 import generation_pb2_grpc
from router.models import Models
from router.server import SERVICE_NAMES
from router.servicer import GenerationServicer
from router.tenants.tenant import OPEN_TENANT, Tenant
from rpc.handler_table import HandlerTable
from rpc.interceptors import CallInterceptor

_SERVICE = f"/{SERVICE_NAMES[0]}/"


class DirectCalls:
    """Calls the methods behind the interceptor, as the server does, without a connection.

    Args:
        models: the router's.
    """

    def __init__(self, models: Models) -> None:
        self._table = HandlerTable(SERVICE_NAMES)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(models), self._table
        )

    async def status(self, method: str, data: bytes) -> str:
        """The name of the status with which a call ends."""
        details = _Details(_SERVICE + method)

        async def find(details: Any) -> Any:
            return self._table.service(details)

        handler = await CallInterceptor(_open_tenant).intercept_service(find, details)
        context = _Context()
        with suppress(grpc.aio.AbortError):
            await handler.stream_stream(_requests(handler, data), context)
        return context.status.name


def _open_tenant(method: str, context: Any) -> Tenant:
    return OPEN_TENANT


async def _requests(handler: Any, data: bytes) -> AsyncIterator[Any]:
    deserialize = handler.request_deserializer
    yield data if deserialize is None else deserialize(data)


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class _Context:
    """The parts of a call's context that the service uses."""

    def __init__(self) -> None:
        self.status = grpc.StatusCode.OK

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        details.encode()
        self.status = code
        raise grpc.aio.AbortError

    async def write(self, response: Any) -> None:
        response.SerializeToString()

    def time_remaining(self) -> float:
        return 60.0

    def code(self) -> grpc.StatusCode:
        return self.status

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "test"


async def status_over_channel(channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    """The name of the status with which a call of a server ends."""
    try:
        if method == "GenerateStream":
            async for _ in channel.unary_stream(_SERVICE + method)(data, timeout=60):
                pass
        else:
            await channel.unary_unary(_SERVICE + method)(data, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
