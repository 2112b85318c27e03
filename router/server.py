"""A router: its models and servers."""

import argparse
import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from typing_extensions import override

from baton.common.observe.metrics_collector import MetricsCollector
from baton.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)
from router.batches.slots import num_places
from router.cluster_servicer import ClusterServicer, ClusterStatus
from router.config.router import RouterConfig, add_args, router_config_from_args
from router.fleet_gauges import fleet_counts, replica_gauges
from router.models import Model, Models, RouterFiles
from router.observe.metrics import RouterMetrics
from router.observe.request_log import RequestLog
from router.processes.link import ProcessLink
from router.processes.place import ProcessPlace
from router.processes.process_server import MetricsServicer, ProcessServicer
from router.registration_servicer import RegistrationServicer
from router.requests.pace import Pace
from router.security import RouterSecurity
from router.servicer import GenerationServicer
from router.stages.admission import Admission
from router.tenants.tenant import OPEN_TENANT
from rpc.discovery.announcements import Announcements
from rpc.interceptors import CountCall
from rpc.metrics_server import MetricsAccess, serving_metrics
from rpc.process_limits import MAX_CONNECTIONS, MemoryWatch, connection_budget
from rpc.process_metrics import ProcessMetrics
from rpc.server import RpcServer, Service, run_process, serve
from rpc.server_access import ConnectionAge, ServerAccess
from rpc.tracing import open_tracer
from rpc.watchdog import end_on_signal, ending_when_stuck

if TYPE_CHECKING:
    from router.batches.service import BatchService
    from router.http.server import HttpServer

__all__ = [
    "SERVICE_NAMES",
    "RouterService",
    "access_of",
    "add_args",
    "connection_limits",
    "main",
    "run",
]

SERVICE_NAMES: tuple[str, ...] = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].full_name,
    registration_pb2.DESCRIPTOR.services_by_name["RegistrationService"].full_name,
)


_LOGGER = logging.getLogger("baton.router")
_STOP_GRACE_S = 2.0  # for answers under way after the drain; as for gRPC
_POLL_S = 0.05
_MAX_REPLICA_WAIT_S = 2.0


class RouterService(Service):
    """A router, which can serve while a decode replica takes requests.

    Args:
        config: the router's.
        files: the files of the config's models, in its order.
        server: gets the servicer, and is set serving while the router can serve.
        security: certificates and credentials, towards clients and workers.
        metrics: counts requests and calls.
        link: connects this process with others of the same router; None if there are none.

    Attributes:
        models: the served models.
        log: the records of the last requests.
        operators: describes the router and its cluster.
        metrics: what Prometheus reads.
        metrics_access: who may read them.
        http: the HTTP server; None if the config has none.
        batches: the files and batches of clients; None if the router keeps none.

    Raises:
        ConfigurationError: a target is malformed, or the tags of the reasoning part are bad.
    """

    def __init__(
        self,
        config: RouterConfig,
        files: Sequence[RouterFiles],
        server: RpcServer,
        security: RouterSecurity,
        metrics: RouterMetrics | None = None,
        link: ProcessLink | None = None,
    ) -> None:
        self._servers = [server]
        self._security = security
        self._link = link
        accounts = None if link is None else link.accounts
        self._admission = Admission(config.max_concurrent_requests, accounts)
        self._tracer = open_tracer(
            config.tracing, "baton-router", {"baton.models": ",".join(_names(config))}
        )
        self._metrics = metrics or RouterMetrics()
        self._metrics.expect(_names(config), [OPEN_TENANT.name] * security.tenants.is_open)
        self.metrics = CollectorRegistry()
        self.metrics.register(MetricsCollector(self._metrics))
        self.log = RequestLog(self._tracer, self._metrics)
        pace = Pace()
        announcements = None if config.grpc.port is None else Announcements()
        parts = self._admission, pace, security.cluster, self.log, announcements
        self.models = Models(
            Model(model, config, own_files, *parts)
            for model, own_files in zip(config.models, files, strict=True)
        )
        # What other processes of the router relay, it does not relay again.
        self._registration = None if announcements is None else RegistrationServicer(announcements)
        if announcements is not None:
            server.add_servicer(
                registration_pb2_grpc.add_RegistrationServiceServicer_to_server,
                RegistrationServicer(announcements, None if link is None else link.others),
            )
        server.add_servicer(
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(self.models),
        )
        self._admission.read_num_seats = lambda: sum(m.fleet.num_seats for m in self.models)
        self._metrics.read_running = lambda: self._admission.num_running
        self._metrics.read_pause_s = lambda: pace.pause_s
        self._metrics.read_fleets = lambda: fleet_counts(self.models)
        self._metrics.read_replicas = lambda: replica_gauges(self.models)
        self._metrics.read_caches = lambda: chain.from_iterable(
            model.fleet.cache_counts() for model in self.models
        )
        self._metrics.read_waiting = lambda: {m.name: len(m.fleet.waiting) for m in self.models}
        status = ClusterStatus(self.models, self._metrics, self.log.activity)
        others = None if link is None else link.others
        self.operators = ClusterServicer(self.log, status, self.models, others)
        server.add_servicer(cluster_pb2_grpc.add_ClusterServiceServicer_to_server, self.operators)
        self._process_servicer = ProcessServicer(
            partial(status.describe, asks_replicas=False), self.operators.traces_here
        )
        self.models.start()
        self._tasks = [asyncio.create_task(self._follow_health(model)) for model in self.models]
        self._tasks.append(asyncio.create_task(pace.run()))
        self._tasks.append(asyncio.create_task(security.tenants.follow_changes()))
        process = ProcessMetrics(
            {"clients": security.certificates, "cluster": security.cluster.certificates}
        )
        process.register(self.metrics)
        self._tasks.append(asyncio.create_task(process.measure_lag()))
        self._tasks.append(asyncio.create_task(MemoryWatch().run()))
        self.metrics_access = MetricsAccess(
            config.metrics, security.cluster, has_clients=not config.security.tenants.is_open
        )
        self._metrics_port = serving_metrics(
            config.metrics, self.metrics, self.metrics_access, config.security.clients
        )
        self._open = ExitStack()
        self.http: HttpServer | None = None
        self.batches: BatchService | None = None
        if config.http.is_on:
            self.http = _http_server(self, config, security, link)
        if config.picker.endpoint_picker_port is not None:
            # Imported here, as HTTP is: it reads the bodies of HTTP requests.
            from router.endpoint_picker.service import PickerService

            shares_port = link is not None
            picker = PickerService(config, self.models, security, shares_port=shares_port)
            self._servers.append(picker.server)
            self._tasks.append(asyncio.create_task(picker.servers.run()))

    async def start_http(self) -> None:
        """Begins to answer HTTP, proxies and readers of metrics, if the config has ports. A process
        that shares its ports takes its first calls now, over gRPC too, and answers the others.

        Raises:
            ConfigurationError: an address cannot be bound, or the port file cannot be written.
        """
        self._open.enter_context(self._metrics_port)
        if self._link is not None:
            await self._wait_for_replicas()
        # The first one has listened since the start, unless its port is shared.
        for server in self._servers[self._link is None :]:
            await server.listen()
        if self.http is not None:
            await self.http.start()
        if self._link is not None:
            await self._link.start(
                MetricsServicer(self.metrics), self._process_servicer, self._registration
            )
        if self.batches is not None:
            self.batches.start()

    async def _wait_for_replicas(self) -> None:
        """Waits a moment until the models can be served, as other processes take the calls."""
        for _ in range(math.ceil(_MAX_REPLICA_WAIT_S / _POLL_S)):
            if self.models.can_serve:
                return
            await asyncio.sleep(_POLL_S)

    async def read_metrics(self) -> bytes:
        """Returns the metrics of the router, in Prometheus' text format.

        Raises:
            UnavailableError: those of its other processes cannot be read.
        """
        if self._link is not None:
            return await self._link.others.metrics()
        return await asyncio.to_thread(generate_latest, self.metrics)

    def count_call(self, protocol: str, status: str) -> None:
        """Counts a call of a client that has ended; see `RouterMetrics`."""
        self._metrics.count_call(protocol, status)

    @override
    def announce_stop(self) -> None:
        for server in self._servers:
            server.begin_stop()
        if self.http is not None:
            self.http.announce_stop()

    @override
    async def drain(self, timeout_s: float) -> None:
        """Closes the ports, so that clients go to other routers, and waits for the calls and
        requests that have come. Batches go on elsewhere or later.
        """
        if self.batches is not None:
            await self.batches.stop()
        await asyncio.gather(*(server.refuse_new() for server in self._servers))
        if self.http is not None:
            self.http.begin_drain()
        for _ in range(math.ceil(timeout_s / _POLL_S)):
            if not self._num_open:
                return
            await asyncio.sleep(_POLL_S)
        if self._num_open:
            _LOGGER.warning("the drain ends with %d calls under way", self._num_open)

    @property
    def _num_open(self) -> int:
        """How many calls and requests of clients are under way."""
        num_calls = sum(server.num_calls for server in self._servers)
        return num_calls + (0 if self.http is None else self.http.num_requests)

    @override
    async def close(self) -> None:
        if self.batches is not None:
            await self.batches.stop()
        if self.http is not None:
            await self.http.stop(_STOP_GRACE_S)
        if self.batches is not None:
            await self.batches.close()
        for server in self._servers[1:]:  # the first one is stopped by `rpc.server`
            await server.stop(_STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._open.close)
        await self.models.close()
        if self._link is not None:
            await self._link.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def batch_places(self) -> int:
        """How many requests of batches may run at once."""
        num_seats = min(self._admission.read_num_seats(), self._admission.max_requests)
        return num_places(num_seats, self._admission.interactive.quiet_s)

    async def _follow_health(self, model: Model) -> None:
        while True:
            for server in self._servers:
                server.set_serving(self.models.can_serve)
            await model.fleet.wait_for_change()


def _names(config: RouterConfig) -> Sequence[str]:
    return [model.names[0] for model in config.models]


def _http_server(
    service: RouterService,
    config: RouterConfig,
    security: RouterSecurity,
    link: ProcessLink | None,
) -> "HttpServer":
    # Imported here: a router without HTTP starts without the packages that HTTP needs.
    from router.http.app import build_app
    from router.http.page.state import PageState
    from router.http.server import HttpServer

    http = replace(config.http, max_connections=connection_limits(config)[0])
    # A proxy in front of a unix socket has clients anywhere, and may ask for localhost for them.
    host = http.host if http.uds is None else ""
    check_operator = partial(security.check_operator, host)
    app = build_app(
        service.models,
        http,
        security.tenants,
        service.read_metrics,
        service.metrics_access.admits,
        partial(service.count_call, "http"),
        None if link is None else link.accounts,
        PageState(service.operators, service.models, config, check_operator).read,
    )
    if http.batch_folder is not None:
        from router.http.batch_service import open_batches

        service.batches = open_batches(app, http, security.tenants, service.batch_places)
    return HttpServer(app, http, security.http_context(), shares_port=link is not None)


def access_of(
    config: RouterConfig, security: RouterSecurity, count_call: CountCall | None = None
) -> ServerAccess:
    """Returns the callers that the router's gRPC server admits, and its limits before parsing."""
    return replace(
        security.grpc_access(config.grpc.host),
        count_call=count_call,
        max_concurrent_calls=config.most_calls,
        max_message_bytes=config.http.max_request_bytes,
        max_connections=connection_limits(config)[1],
        send_timeout_s=config.http.send_timeout_s,
        connection_age=_connection_age(config),
    )


def _connection_age(config: RouterConfig) -> ConnectionAge | None:
    age_s, grace_s = config.http.max_connection_age_s, config.http.max_connection_age_grace_s
    if age_s is None:
        return None
    return ConnectionAge(age_s, config.default_timeout_s if grace_s is None else grace_s)


def connection_limits(config: RouterConfig) -> tuple[int, int]:
    """The most connections over HTTP and over gRPC, which share the process's open files."""
    budget = connection_budget()
    if not config.http.is_on:
        return 0, min(MAX_CONNECTIONS, budget)
    if config.grpc.port is None:
        return min(config.http.max_connections, budget), 1
    most_http = min(config.http.max_connections, budget * 2 // 3)
    return most_http, min(MAX_CONNECTIONS, budget - most_http)


async def run(config: RouterConfig) -> None:
    """Serves until a signal to stop, then drains.

    Raises:
        ConfigurationError: a model's files, a flag, a target or an address is bad.
    """
    metrics, place = RouterMetrics(), ProcessPlace.from_environment()
    link = None if place is None else ProcessLink(place)
    if link is not None:
        end_on_signal()  # which the parent sends if this process hangs
    accounts = None if link is None else link.accounts
    security = RouterSecurity(config.security, metrics.count_refusal, accounts)

    async def start(server: RpcServer) -> RouterService:
        loads = (asyncio.to_thread(RouterFiles.load, model) for model in config.models)
        files = await asyncio.gather(*loads)
        service = RouterService(config, files, server, security, metrics, link)
        try:
            await service.start_http()
        except BaseException:
            await service.close()
            raise
        return service

    access = access_of(config, security, partial(metrics.count_call, "grpc"))
    access = replace(access, shares_port=link is not None)
    # The parent of several processes watches them.
    async with ending_when_stuck() if link is None else nullcontext():
        await serve(config.grpc, SERVICE_NAMES, start, access)


def main(args: argparse.Namespace) -> int:
    """Runs the router, which serves clients and calls the prefill and decode replicas."""

    async def run_router() -> None:
        await run(router_config_from_args(args))

    return run_process("baton router", args.log_level, args.log_format, run_router)
