"""`ProcessServer`: answers the other processes of a router at a Unix socket."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.v1 import (
    cluster_pb2,
    registration_pb2_grpc,
    router_process_pb2,
    router_process_pb2_grpc,
)
from router.registration_servicer import RegistrationServicer
from rpc.channels import SERVER_OPTIONS
from rpc.interceptors import CallInterceptor
from rpc.standard_services import HealthServicer

__all__ = ["MetricsServicer", "ProcessServer", "ProcessServicer"]

_STOP_GRACE_S = 0.5
"""Without it, gRPC would write a line to the log of each process that is connected."""


class MetricsServicer(router_process_pb2_grpc.RouterMetricsServiceServicer):
    """Answers with metrics.

    Args:
        registry: the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._incarnation = uuid.uuid4().hex

    @override
    async def GetMetrics(
        self, request: router_process_pb2.GetMetricsRequest, context: Any
    ) -> router_process_pb2.GetMetricsResponse:
        text = await asyncio.to_thread(generate_latest, self._registry)
        return router_process_pb2.GetMetricsResponse(incarnation=self._incarnation, text=text)


class ProcessServicer(router_process_pb2_grpc.RouterProcessServiceServicer):
    """Answers for a process that serves requests.

    Args:
        describe: returns its state.
        find_traces: returns its records of requests.
    """

    def __init__(
        self,
        describe: Callable[[], Awaitable[router_process_pb2.GetProcessResponse]],
        find_traces: Callable[[cluster_pb2.GetTraceRequest], cluster_pb2.GetTraceResponse],
    ) -> None:
        self._describe = describe
        self._find_traces = find_traces

    @override
    async def GetProcess(
        self, request: router_process_pb2.GetProcessRequest, context: Any
    ) -> router_process_pb2.GetProcessResponse:
        return await self._describe()

    @override
    async def GetProcessTrace(
        self, request: router_process_pb2.GetProcessTraceRequest, context: Any
    ) -> router_process_pb2.GetProcessTraceResponse:
        trace = self._find_traces(request.trace)
        return router_process_pb2.GetProcessTraceResponse(trace=trace)


class ProcessServer:
    """A server at a Unix socket. Its health is SERVING from the start.

    Args:
        target: the socket, as a gRPC target.
        metrics: answers with metrics.
        process: answers for a process that serves requests; None for one that serves none.
        registration: takes what workers have announced to others; None if none can.
    """

    def __init__(
        self,
        target: str,
        metrics: MetricsServicer,
        process: ProcessServicer | None = None,
        registration: RegistrationServicer | None = None,
    ) -> None:
        self._target = target
        health = HealthServicer(())
        health.set_serving(True)
        self._server = grpc.aio.server(interceptors=[CallInterceptor()], options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        router_process_pb2_grpc.add_RouterMetricsServiceServicer_to_server(metrics, self._server)
        if process is not None:
            router_process_pb2_grpc.add_RouterProcessServiceServicer_to_server(
                process, self._server
            )
        if registration is not None:
            registration_pb2_grpc.add_RegistrationServiceServicer_to_server(
                registration, self._server
            )

    async def start(self) -> None:
        """Begins to answer.

        Raises:
            ConfigurationError: the socket cannot be made.
        """
        try:
            self._server.add_insecure_port(self._target)
        except RuntimeError:
            raise ConfigurationError(f"cannot listen on {self._target}") from None
        await self._server.start()

    async def stop(self) -> None:
        """Waits a moment for calls under way, ends them, and removes the socket. Idempotent."""
        await self._server.stop(_STOP_GRACE_S)
