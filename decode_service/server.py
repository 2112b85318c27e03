"""Wires a decode replica: engine, servicers, server."""

import argparse

from prometheus_client import CollectorRegistry

from baton.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from decode_service.config import DecodeConfig, add_args, config_from_args
from decode_service.servicer import DecodeServicer
from engine.async_engine import AsyncEngine
from engine.worker import EngineWorker, register_metrics
from rpc.metrics_server import serving_metrics
from rpc.process import run_process
from rpc.server import RpcServer, serve
from rpc.worker import WorkerTier

__all__ = ["SERVICE_NAMES", "add_args", "add_services", "main", "run"]

SERVICE_NAMES: tuple[str, ...] = (
    decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)


def add_services(engine: AsyncEngine, server: RpcServer) -> WorkerTier:
    """Adds a started engine's services to a server, which then is ready."""
    servicer = DecodeServicer(engine)
    server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)
    worker = EngineWorker(engine, worker_pb2.WORKER_ROLE_DECODE)
    return WorkerTier(worker, server, flush=servicer.close)


async def run(config: DecodeConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        ConfigurationError: the checkpoint, a flag, the connector or an address is bad.
    """
    registry = CollectorRegistry()

    async def start(server: RpcServer) -> WorkerTier:
        engine = await AsyncEngine.start(config.engine)
        register_metrics(engine, registry)
        return add_services(engine, server)

    with serving_metrics(config.metrics, registry):
        await serve(config.server, SERVICE_NAMES, start)


def main(args: argparse.Namespace) -> int:
    """Runs one decode replica: takes handed-over KV and streams tokens to routers."""
    return run_process("baton decode", args.log_level, lambda: run(config_from_args(args)))
