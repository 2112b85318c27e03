"""A decode replica: its flags, and its engine and servicers behind one server."""

import argparse

from prometheus_client import CollectorRegistry

from baton.flags import config_from_args
from baton.security.cluster import ClusterSecurity
from baton.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from decode_service.servicer import DecodeServicer
from engine.async_engine import AsyncEngine
from engine.cli_args import FIXED_FIELDS, add_engine_args, engine_config_from_args
from engine.worker import EngineWorker, register_metrics
from rpc.server import RpcServer, run_process
from rpc.tracing import TracingConfig
from rpc.worker import WorkerTier, add_worker_args, serve_worker
from rpc.worker_spans import WorkerSpans

__all__ = ["SERVICE_NAMES", "add_args", "add_services", "main"]

_DEFAULT_PORT = 50062

SERVICE_NAMES: tuple[str, ...] = (
    decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a decode server."""
    add_worker_args(parser, default_port=_DEFAULT_PORT)
    add_engine_args(parser, omit=FIXED_FIELDS["decode"])


def add_services(
    engine: AsyncEngine, server: RpcServer, tracing: TracingConfig | None = None
) -> WorkerTier:
    """Adds a started engine's services to a server and sets it serving.

    Args:
        engine: the engine.
        server: the server.
        tracing: where spans are sent; None sends none.
    """
    worker = EngineWorker(engine, worker_pb2.WORKER_ROLE_DECODE)
    spans = WorkerSpans.open(tracing or TracingConfig(), "decode", worker.info)
    servicer = DecodeServicer(engine, spans)
    server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)
    return WorkerTier(worker, server, flush=servicer.close, spans=spans)


async def _run(args: argparse.Namespace) -> None:
    tracing = config_from_args(TracingConfig, args)
    config = engine_config_from_args(args, role="decode")

    async def start(
        server: RpcServer, registry: CollectorRegistry, security: ClusterSecurity
    ) -> WorkerTier:
        engine = await AsyncEngine.start(config, security)
        register_metrics(engine, registry)
        return add_services(engine, server, tracing)

    await serve_worker(args, SERVICE_NAMES, start)


def main(args: argparse.Namespace) -> int:
    """Runs one decode replica: takes handed-over KV and streams tokens to routers."""
    return run_process("baton decode", args.log_level, args.log_format, lambda: _run(args))
