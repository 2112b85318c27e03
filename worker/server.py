"""A worker: its flags, and one engine behind the services of both tiers."""

import argparse
import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles, CredentialsConfig
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from decode_service.servicer import DecodeServicer
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import EngineConfig
from engine.loop.async_engine import AsyncEngine
from engine.request import Role
from engine.runtime.ranks.place import RankPlace, place_of
from engine.worker import EngineWorker, register_metrics
from prefill_service.servicer import PrefillServicer
from rpc.server import RpcServer, run_process
from rpc.stop_signals import STOP_SIGNALS, stop_signals_in_use
from rpc.tracing import TracingConfig, WorkerSpans
from rpc.worker import WorkerTier, add_worker_args, serve_worker
from worker.kv_events.config import KvEventsConfig
from worker.processes.ray_nodes import engine_on_ray
from worker.replica_processes import ReplicaSetConfig, add_replica_args, run_replicas

if TYPE_CHECKING:
    from worker.kv_events.publisher import KvEventPublisher
    from worker.kv_events.sockets import KvEventSockets

__all__ = ["SERVICE_NAMES", "add_args", "add_services", "run_worker"]

_LOGGER = logging.getLogger("baton.engine")
_DEFAULT_PORTS = {Role.PREFILL: 50061, Role.DECODE: 50062}

SERVICE_NAMES: tuple[str, ...] = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)


def add_args(parser: argparse.ArgumentParser, role: Role) -> None:
    """Adds the flags of a worker that starts with a role."""
    add_worker_args(parser, default_port=_DEFAULT_PORTS[role])
    add_replica_args(parser)
    add_flags(parser, KvEventsConfig, "server")
    add_engine_args(parser, omit=("data_parallel_size",))


def add_services(
    engine: AsyncEngine,
    server: RpcServer,
    tracing: TracingConfig | None = None,
    publisher: "KvEventPublisher | None" = None,
) -> WorkerTier:
    """Adds a started engine's services to a server and sets it serving.

    Args:
        engine: the engine; its role says which requests it takes at first.
        server: the server.
        tracing: where spans are sent; None sends none.
        publisher: publishes the engine's KV events; closed with the worker.
    """
    worker = EngineWorker(engine)
    open_spans = partial(WorkerSpans.open, tracing or TracingConfig(), worker=worker.info)
    spans = {tier: open_spans(tier) for tier in ("prefill", "decode")}
    decode = DecodeServicer(engine, spans["decode"])
    server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode)
    server.add_servicer(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(engine, spans["prefill"]),
    )
    closers: list[Callable[[], Awaitable[None]]] = [
        partial(asyncio.to_thread, span_buffer.close)
        for span_buffer in spans.values()
        if span_buffer is not None
    ]
    if publisher is not None:
        closers.append(publisher.close)
    return WorkerTier(worker, server, flush=decode.close, closers=closers)


async def _run(args: argparse.Namespace, role: Role) -> None:
    tracing = config_from_args(TracingConfig, args)
    events = config_from_args(KvEventsConfig, args)
    config, replicas = engine_config_from_args(args), config_from_args(ReplicaSetConfig, args)
    if replicas.on == "ray":
        config = engine_on_ray(config)
    if Role.PREFILL in role and config.kv_connector is None:
        raise ConfigurationError(
            "--kv-connector is not set; a prefill worker needs it to hand KV over"
        )
    events.check_engine(config)
    if replicas.data_parallel_size is not None:
        await run_replicas(args, role.label, config, replicas)
        return

    place = place_of(config) if config.num_ranks > 1 else None
    if place is not None and place.rank > 0:
        await _follow(args, config, place)
        return

    async def start(
        server: RpcServer, registry: CollectorRegistry, security: ClusterSecurity
    ) -> WorkerTier:
        sockets = None if events.kv_events_zmq is None else _open_sockets(events)
        engine = await AsyncEngine.start(config, security)
        engine.role = role
        register_metrics(engine, registry)
        publisher = None if sockets is None else _publisher(sockets, engine, events)
        return add_services(engine, server, tracing, publisher)

    await serve_worker(args, SERVICE_NAMES, start)


# ZMQ and msgspec are optional, and imported where they are used.


def _open_sockets(config: KvEventsConfig) -> "KvEventSockets":
    from worker.kv_events.sockets import KvEventSockets

    return KvEventSockets(config)


def _publisher(
    sockets: "KvEventSockets", engine: AsyncEngine, config: KvEventsConfig
) -> "KvEventPublisher":
    from worker.kv_events.publisher import KvEventPublisher

    topic, rank = config.topic(engine.config.model_name), config.kv_events_rank
    return KvEventPublisher(sockets, engine, topic, rank)


async def _follow(args: argparse.Namespace, config: EngineConfig, place: RankPlace) -> None:
    """Runs a rank other than 0, which serves nothing, until rank 0 has ended."""
    from engine.runtime.ranks.hosts import HostRanks
    from engine.runtime.ranks.loop import follow

    files = config_from_args(CertificateFiles, args)
    security = ClusterSecurity.from_environment(config_from_args(CredentialsConfig, args), files)
    where = place.rank, place.size, place.address, place.port
    _LOGGER.info("rank %d of %d meets the others at %s:%d", *where)
    for number in stop_signals_in_use():  # at once, though a thread waits
        signal.signal(number, signal.SIG_DFL)
    ranks = await asyncio.to_thread(HostRanks, place, config, security)
    for number in STOP_SIGNALS:  # rank 0 may drain, and ends this process then
        signal.signal(number, signal.SIG_IGN)
    await asyncio.to_thread(follow, config, ranks, security)


def run_worker(args: argparse.Namespace, role: Role) -> int:
    """Runs a worker that starts with a role, or several of them; returns the exit status."""
    name = f"baton {role.label}"
    return run_process(name, args.log_level, args.log_format, lambda: _run(args, role))
