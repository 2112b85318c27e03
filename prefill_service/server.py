"""A prefill replica: its flags, and its engine and servicers behind one server."""

import argparse

from prometheus_client import CollectorRegistry

from baton.flags import config_from_args
from baton.security.cluster import ClusterSecurity
from baton.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from engine.async_engine import AsyncEngine
from engine.cli_args import FIXED_FIELDS, add_engine_args, engine_config_from_args
from engine.worker import EngineWorker, register_metrics
from prefill_service.servicer import PrefillServicer
from rpc.server import RpcServer, run_process
from rpc.tracing import TracingConfig
from rpc.worker import WorkerTier, add_worker_args, serve_worker
from rpc.worker_spans import WorkerSpans

__all__ = ["SERVICE_NAMES", "add_args", "add_services", "main"]

_DEFAULT_PORT = 50061

SERVICE_NAMES: tuple[str, ...] = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a prefill server."""
    add_worker_args(parser, default_port=_DEFAULT_PORT)
    add_engine_args(parser, omit=FIXED_FIELDS["prefill"])


def add_services(
    engine: AsyncEngine, server: RpcServer, tracing: TracingConfig | None = None
) -> WorkerTier:
    """Adds a started engine's services to a server and sets it serving.

    Args:
        engine: the engine.
        server: the server.
        tracing: where spans are sent; None sends none.
    """
    worker = EngineWorker(engine, worker_pb2.WORKER_ROLE_PREFILL)
    spans = WorkerSpans.open(tracing or TracingConfig(), "prefill", worker.info)
    servicer = PrefillServicer(engine, spans)
    server.add_servicer(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, servicer)
    return WorkerTier(worker, server, spans=spans)


async def _run(args: argparse.Namespace) -> None:
    tracing = config_from_args(TracingConfig, args)
    config = engine_config_from_args(args, role="prefill")

    async def start(
        server: RpcServer, registry: CollectorRegistry, security: ClusterSecurity
    ) -> WorkerTier:
        engine = await AsyncEngine.start(config, security)
        register_metrics(engine, registry)
        return add_services(engine, server, tracing)

    await serve_worker(args, SERVICE_NAMES, start)


def main(args: argparse.Namespace) -> int:
    """Runs one prefill replica: computes prompts and hands their KV over through the connector."""
    return run_process("baton prefill", args.log_level, args.log_format, lambda: _run(args))
