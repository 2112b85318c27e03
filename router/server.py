"""A router: its tokenizer, replicas, pipeline and servicer behind one server."""

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from baton.v1 import generation_pb2, generation_pb2_grpc
from router.admission import Admission
from router.config import RouterConfig, add_args, config_from_args
from router.fleet import Fleet
from router.generation_config import load_default_params
from router.pipeline import Pipeline
from router.policy import PrefixIndex
from router.servicer import GenerationServicer
from router.tokenizer import Tokenizer
from rpc.server import RpcServer, Service, run_process, serve

__all__ = ["SERVICE_NAMES", "RouterService", "add_args", "main", "run"]

SERVICE_NAMES: tuple[str, ...] = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
)


class RouterService(Service):
    """A started router. It can serve while a decode replica takes requests.

    Args:
        config: the router's.
        tokenizer: the model's.
        default_params: values of sampling parameters that a request leaves unset.
        server: gets the servicer, and is set serving while the router can serve.

    Attributes:
        fleet: the replicas.

    Raises:
        ConfigurationError: a target is malformed, or the marks of the reasoning part are bad.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        default_params: Mapping[str, Any],
        server: RpcServer,
    ) -> None:
        prefix_index = PrefixIndex(config.max_indexed_blocks)
        self._server = server
        self.fleet = Fleet(config, prefix_index)
        self._admission = Admission(config.max_concurrent_requests)
        pipeline = Pipeline(
            config, tokenizer, default_params, self.fleet, prefix_index, self._admission
        )
        server.add_servicer(
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(config, tokenizer, self.fleet, pipeline),
        )
        self.fleet.start()
        self._health = asyncio.create_task(self._follow_health())

    @override
    async def drain(self, timeout_s: float) -> None:
        await self._admission.drain(timeout_s)

    @override
    async def close(self) -> None:
        self._health.cancel()
        await self.fleet.close()

    async def _follow_health(self) -> None:
        while True:
            self._server.set_serving(self.fleet.can_serve)
            await self.fleet.wait_for_change()


async def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        ConfigurationError: the tokenizer, generation_config.json, a flag, a target or the
            address is bad.
    """

    async def start(server: RpcServer) -> RouterService:
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
        default_params = await asyncio.to_thread(
            load_default_params, config.model, config.generation_config
        )
        return RouterService(config, tokenizer, default_params, server)

    await serve(config.server, SERVICE_NAMES, start)


def main(args: argparse.Namespace) -> int:
    """Runs the router, which serves clients and calls the prefill and decode replicas."""
    return run_process("baton router", args.log_level, lambda: run(config_from_args(args)))
