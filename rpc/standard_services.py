"""The services of gRPC itself that every server has: health and reflection.

The servicer of grpcio-health-checking has a bug: when one of several watchers of a
service leaves, the others miss every later change.

Newer clients ask `grpc.reflection.v1`, older ones `grpc.reflection.v1alpha`. Their messages are the
same bytes, so one servicer answers both. The package has the older description alone; that of the
newer one is made of it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from baton.common.errors import NotFoundError
from baton.common.short_texts import short_repr

__all__ = ["HEALTH_SERVICE_NAME", "HealthServicer", "add_reflection"]

LIVENESS = "liveness"
"""Name that health answers SERVING for, as long as the event loop answers: while a model is loaded,
while a step hangs and during a drain too. Probes that end a process ask for it.
"""
HEALTH_SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_OLD_PACKAGE = "grpc.reflection.v1alpha"
_NEW_PACKAGE = "grpc.reflection.v1"
_NEW_FILE = "grpc/reflection/v1/reflection.proto"
_NEW_SERVICE = f"{_NEW_PACKAGE}.ServerReflection"
_METHOD = "ServerReflectionInfo"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """Reports one status for all services of a server; "" names the server itself, and `LIVENESS`
    its event loop.

    Args:
        service_names: full names of the services, for example `baton.v1.WorkerService`.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._service_names = frozenset(("", LIVENESS, *service_names))
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether the status is SERVING."""
        return self._is_serving

    def set_serving(self, is_serving: bool) -> None:
        """Changes the status and notifies watchers. Has no effect after `close`."""
        if self._is_closed or is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        self._notify()

    def close(self) -> None:
        """Sets NOT_SERVING for good, notifies watchers and ends their streams."""
        self.set_serving(False)
        self._is_closed = True
        self._notify()

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:  # noqa: N802 - gRPC's name
        """Returns the status; NOT_FOUND for a service that this server does not have."""
        if request.service not in self._service_names:
            raise NotFoundError(f"service {short_repr(request.service)} is not served here")
        return HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - gRPC's name
        self, request: HealthCheckRequest, context: Any
    ) -> AsyncIterator[HealthCheckResponse]:
        """Streams the status: now and after each change. SERVICE_UNKNOWN for a service that this
        server does not have.
        """
        sent = None
        while True:
            # All three are read at one moment, so that a change during the write is not missed.
            changed, is_last = self._changed, self._is_closed
            status = self._status(request.service)
            if status != sent:
                yield HealthCheckResponse(status=status)
                sent = status
            if is_last:
                return
            await changed.wait()

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Returns the status of every service. Only newer versions of the package have it."""
        statuses = {
            name: HealthCheckResponse(status=self._status(name)) for name in self._service_names
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    def _status(self, service: str) -> "HealthCheckResponse.ServingStatus":
        if service not in self._service_names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        is_serving = self._is_serving or service == LIVENESS
        return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING

    def _notify(self) -> None:
        """Wakes all watchers. Each change has an event of its own, so no watcher misses one."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Makes a server answer questions of both versions.

    Args:
        server: the server, which is not listening yet.
        service_names: full names of the services to list, besides reflection itself.
    """
    _describe_new_version()
    names = (*service_names, reflection.SERVICE_NAME, _NEW_SERVICE)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(_NEW_SERVICE, {_METHOD: method})
    server.add_generic_rpc_handlers((handler,))


def _describe_new_version() -> None:
    """Adds the newer description to the pool of descriptors, unless a package has done so."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_NEW_FILE)
    except KeyError:
        pool.AddSerializedFile(_new_description().SerializeToString())


def _new_description() -> descriptor_pb2.FileDescriptorProto:
    """The older description under the names of the newer version."""
    new = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(new)
    new.name, new.package = _NEW_FILE, _NEW_PACKAGE
    for message in new.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = _new_name(field.type_name)
    for service in new.service:
        for method in service.method:
            method.input_type = _new_name(method.input_type)
            method.output_type = _new_name(method.output_type)
    return new


def _new_name(type_name: str) -> str:
    return type_name.replace(f".{_OLD_PACKAGE}.", f".{_NEW_PACKAGE}.")
