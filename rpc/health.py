"""`HealthServicer`: grpc.health.v1 for one server.

The servicer of grpcio-health-checking has a bug: when one of several watchers of a
service leaves, the others miss every later change.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from baton.common.errors import NotFoundError
from baton.common.short_texts import short_repr

__all__ = ["HEALTH_SERVICE_NAME", "HealthServicer"]

HEALTH_SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """Reports one status for all services of a server; "" names the server itself.

    Args:
        service_names: full names of the services, for example `baton.v1.WorkerService`.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._service_names = frozenset(("", *service_names))
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
        return HealthCheckResponse.SERVING if self._is_serving else HealthCheckResponse.NOT_SERVING

    def _notify(self) -> None:
        """Wakes all watchers. Each change has an event of its own, so no watcher misses one."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
