"""A worker of either tier as a gRPC server: its flags, its life and WorkerService."""

import argparse
import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from typing_extensions import override

from baton.common.errors import ConfigurationError, InvalidArgumentError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles, CredentialsConfig
from baton.v1 import worker_pb2, worker_pb2_grpc
from rpc.discovery.announced import MODEL_LABEL, ROLE_LABEL
from rpc.metrics_server import MetricsAccess, serving_metrics
from rpc.process_limits import MemoryWatch
from rpc.process_metrics import ProcessMetrics
from rpc.registration import RegisteredService, RegistrationConfig, add_registration_args
from rpc.server import RpcServer, Service, serve
from rpc.server_access import cluster_access
from rpc.server_config import MetricsConfig, ServerConfig
from rpc.tracing import TracingConfig
from rpc.watchdog import ending_when_stuck

__all__ = [
    "Worker",
    "WorkerServicer",
    "WorkerTier",
    "add_worker_args",
    "serve_worker",
    "worker_server_config",
]

_DEFAULT_WATCH_INTERVAL_MS = 50
_DEFAULT_DRAIN_TIMEOUT_MS = 30_000
_HEARTBEAT_S = 0.25

StartWorker = Callable[
    [RpcServer, CollectorRegistry, ClusterSecurity], Coroutine[Any, Any, "WorkerTier"]
]
"""Starts a worker, adds its servicers to the server and its metrics to the registry. The security
is for the calls of its KV connector.
"""


def add_worker_args(parser: argparse.ArgumentParser, *, default_port: int) -> None:
    """Adds the flags of a worker's server and of its metrics."""
    add_flags(
        parser,
        ServerConfig,
        "server",
        defaults={"port": default_port},
        helps={"port": "port of the gRPC server; 0 picks a free one"},
    )
    add_registration_args(parser)
    add_flags(parser, MetricsConfig, "metrics")
    add_flags(parser, CertificateFiles, "security")
    add_flags(parser, CredentialsConfig, "security")
    add_flags(parser, TracingConfig, "tracing")


async def serve_worker(
    args: argparse.Namespace, service_names: Sequence[str], start: StartWorker
) -> None:
    """Serves a worker and its metrics until a signal to stop, then drains it.

    Args:
        args: parsed flags of `add_worker_args`.
        service_names: full names of the worker's services.
        start: starts the worker.

    Raises:
        ConfigurationError: a flag is out of range, an address cannot be bound, or the worker
            cannot start.
    """
    (server_config, security), registry = worker_server_config(args), CollectorRegistry()
    files = config_from_args(CertificateFiles, args)
    registration = config_from_args(RegistrationConfig, args)
    access = cluster_access(security, server_config.host)

    async def start_registered(server: RpcServer) -> Service:
        tier = await start(server, registry, security)
        address = registration.address(server_config, server.port)
        return RegisteredService.of(tier, registration, address, tier.labels, security)

    metrics = config_from_args(MetricsConfig, args)
    with serving_metrics(metrics, registry, MetricsAccess(metrics, security), files):
        async with _measuring_process(registry, security), ending_when_stuck():
            await serve(server_config, service_names, start_registered, access)


def worker_server_config(args: argparse.Namespace) -> tuple[ServerConfig, ClusterSecurity]:
    """Returns where a worker listens, and what it shows to others of its cluster and asks of them.

    Args:
        args: parsed flags of `add_worker_args`.

    Raises:
        ConfigurationError: a flag is out of range.
    """
    config = config_from_args(ServerConfig, args)
    if config.port is None:
        raise ConfigurationError("--port is none; a worker is called by gRPC alone")
    files = config_from_args(CertificateFiles, args)
    return config, ClusterSecurity.from_environment(
        config_from_args(CredentialsConfig, args), files
    )


@asynccontextmanager
async def _measuring_process(
    registry: CollectorRegistry, security: ClusterSecurity
) -> AsyncIterator[None]:
    """Adds the metrics of this process to a registry, and watches its memory."""
    process = ProcessMetrics({"cluster": security.certificates})
    process.register(registry)
    measuring = [
        asyncio.create_task(coroutine) for coroutine in (process.measure_lag(), MemoryWatch().run())
    ]
    try:
        yield
    finally:
        for task in measuring:
            task.cancel()


class Worker(Protocol):
    """The worker behind WorkerService; `engine.worker.EngineWorker` implements it."""

    @property
    def info(self) -> worker_pb2.GetInfoResponse:
        """The description of what the worker serves; only its role changes."""

    def change_role(self, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Changes which new requests the worker takes.

        Raises:
            InvalidArgumentError: there is no such role.
            FailedPreconditionError: the worker cannot have this role.
        """

    def load(self) -> worker_pb2.WorkerLoad:
        """Returns the load now. Must be cheap."""

    def counters(self) -> worker_pb2.WorkerCounters:
        """Returns what the worker has done since its start."""

    def kv_backends(self) -> Sequence[worker_pb2.KvBackendStatus]:
        """Returns the backends of the worker's KV connector, as they are now."""

    def abort(self, request_ids: Sequence[str]) -> int:
        """Ends requests with ABORTED; returns how many were running."""

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks were cached."""

    async def lend_prefix(
        self, request: worker_pb2.LendPrefixRequest
    ) -> worker_pb2.LendPrefixResponse:
        """Lends the beginning of a prompt from the prefix cache; cancelling takes it back.

        Raises:
            FailedPreconditionError: the worker has another namespace, or cannot lend.
            InvalidArgumentError: a key has another length.
        """

    def watch_kv_events(self) -> AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]:
        """Yields the prefix cache's content, then each change, without end."""

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for the running ones; returns how many remain."""

    async def wait_failed(self) -> BaseException:
        """Waits until the worker can serve no more; returns the cause."""

    async def close(self) -> None:
        """Releases all resources."""


class WorkerTier(Service):
    """A started worker. Adds WorkerService to its server and sets it serving.

    Args:
        worker: a started worker; closed with the tier.
        server: the server, which already has the servicers of both tiers.
        flush: waits, for at most the seconds that it is passed, until the streams of
            these servicers have sent their last outputs.
        closers: called when the worker has been closed.
    """

    def __init__(
        self,
        worker: Worker,
        server: RpcServer,
        flush: Callable[[float], Awaitable[None]] | None = None,
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._worker = worker
        self._server = server
        self._flush = flush
        self._closers = closers
        self._servicer = WorkerServicer(worker, lambda: server.set_serving(False))
        self._watches = [
            asyncio.create_task(self._watch_failure()),
            asyncio.create_task(self._watch_health()),
        ]
        server.add_servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._servicer)
        server.set_serving(True)

    def labels(self) -> Mapping[str, str]:
        """What the worker states of itself when it is announced to routers."""
        info = self._worker.info
        role = worker_pb2.WorkerRole.Name(info.role).removeprefix("WORKER_ROLE_").lower()
        return {MODEL_LABEL: info.model, ROLE_LABEL: role}

    @override
    async def drain(self, timeout_s: float) -> None:
        """Also waits until the last outputs of the running requests are sent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._worker.drain(timeout_s)
        self._servicer.close()
        if self._flush is not None:
            await self._flush(max(0.0, deadline - loop.time()))

    @override
    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._worker.close()
        for close in self._closers:
            await close()

    async def _watch_failure(self) -> None:
        self._server.fail(await self._worker.wait_failed())

    async def _watch_health(self) -> None:
        """Sets NOT_SERVING while a step of the worker hangs."""
        was_stalled = False
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            load = self._worker.load()
            if load.stalled != was_stalled:
                was_stalled = load.stalled
                self._server.set_serving(not (load.stalled or load.draining))


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Describes and controls one worker; `protos/baton/v1/worker.proto` documents the methods.

    Args:
        worker: the worker.
        on_drain: called when the Drain method begins, for example to set NOT_SERVING.
    """

    def __init__(self, worker: Worker, on_drain: Callable[[], None]) -> None:
        self._worker = worker
        self._on_drain = on_drain
        self._closed = asyncio.Event()

    @override
    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: Any
    ) -> worker_pb2.GetInfoResponse:
        """Returns what the worker serves."""
        return self._worker.info

    @override
    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: Any
    ) -> worker_pb2.GetLoadResponse:
        """Returns the worker's load, what it has done, and the backends of its KV connector."""
        worker = self._worker
        return worker_pb2.GetLoadResponse(
            load=worker.load(), counters=worker.counters(), kv_backends=worker.kv_backends()
        )

    @override
    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Streams the load: now, after each change and as heartbeats, until `close`."""
        interval_s = _watch_interval_ms(request) / 1000
        clock = asyncio.get_running_loop().time
        sent, sent_at = None, 0.0
        while not self._closed.is_set():
            load = self._worker.load()
            report = worker_pb2.WatchLoadResponse(load=load)
            load.ClearField("age_s")  # it grows without a change
            if load != sent or clock() - sent_at >= _HEARTBEAT_S - interval_s:
                yield report
                sent, sent_at = load, clock()
            await self._closed_within(interval_s)

    @override
    async def Abort(
        self, request: worker_pb2.AbortRequest, context: Any
    ) -> worker_pb2.AbortResponse:
        """Ends requests with ABORTED."""
        return worker_pb2.AbortResponse(num_aborted=self._worker.abort(request.request_ids))

    @override
    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        """Refuses new requests and waits for the running ones or for the timeout."""
        is_set = request.HasField("timeout_ms")
        timeout_ms = request.timeout_ms if is_set else _DEFAULT_DRAIN_TIMEOUT_MS
        self._on_drain()
        return worker_pb2.DrainResponse(num_remaining=await self._worker.drain(timeout_ms / 1000))

    @override
    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: Any
    ) -> worker_pb2.ChangeRoleResponse:
        """Changes which new requests the worker takes."""
        self._worker.change_role(request.role)
        return worker_pb2.ChangeRoleResponse()

    @override
    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Empties the prefix cache."""
        num_blocks = await self._worker.reset_prefix_cache()
        return worker_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks)

    @override
    async def LendPrefix(
        self, request: worker_pb2.LendPrefixRequest, context: Any
    ) -> worker_pb2.LendPrefixResponse:
        """Lends the beginning of a prompt from the prefix cache."""
        return await self._worker.lend_prefix(request)

    @override
    async def WatchKvEvents(
        self, request: worker_pb2.WatchKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
        """Streams the prefix cache's content and then its changes, until `close`."""
        closed = asyncio.create_task(self._closed.wait())
        try:
            async with aclosing(self._worker.watch_kv_events()) as responses:
                while (response := await _next_unless(closed, responses)) is not None:
                    yield response
        finally:
            closed.cancel()

    def close(self) -> None:
        """Ends the streams of WatchLoad and WatchKvEvents."""
        self._closed.set()

    async def _closed_within(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed.wait()
        except TimeoutError:
            pass


async def _next_unless(
    ended: "asyncio.Task[bool]", responses: AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]
) -> worker_pb2.WatchKvEventsResponse | None:
    """Returns the next response; None if `ended` is done first."""
    coming = asyncio.ensure_future(anext(responses))
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


def _watch_interval_ms(request: worker_pb2.WatchLoadRequest) -> int:
    if not request.HasField("interval_ms"):
        return _DEFAULT_WATCH_INTERVAL_MS
    if request.interval_ms < 1:
        raise InvalidArgumentError.for_field("interval_ms", request.interval_ms, ">= 1")
    return request.interval_ms
