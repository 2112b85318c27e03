"""Wires a prefill replica: engine, servicers, server."""

import argparse

from prometheus_client import CollectorRegistry

from baton.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from engine.async_engine import AsyncEngine
from engine.worker import EngineWorker, register_metrics
from prefill_service.config import PrefillConfig, add_args, config_from_args
from prefill_service.servicer import PrefillServicer
from rpc.metrics_server import serving_metrics
from rpc.process import run_process
from rpc.server import RpcServer, serve
from rpc.worker import WorkerTier

__all__ = ["SERVICE_NAMES", "add_args", "add_services", "main", "run"]

SERVICE_NAMES: tuple[str, ...] = (
    prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
)


def add_services(engine: AsyncEngine, server: RpcServer) -> WorkerTier:
    """Adds a started engine's services to a server, which then is ready."""
    servicer = PrefillServicer(engine)
    server.add_servicer(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, servicer)
    worker = EngineWorker(engine, worker_pb2.WORKER_ROLE_PREFILL)
    return WorkerTier(worker, server)


async def run(config: PrefillConfig) -> None:
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
    """Runs one prefill replica: computes prompts and hands their KV over through the connector."""
    return run_process("baton prefill", args.log_level, lambda: run(config_from_args(args)))
