"""A router and real engines on a tiny checkpoint, all in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.config import EngineConfig
from engine.loop.async_engine import AsyncEngine
from engine.request import Role
from router.config.router import RouterConfig
from router.models import RouterFiles
from router.security import RouterSecurity
from router.server import SERVICE_NAMES, RouterService, access_of
from rpc.channels import open_channel
from rpc.server import RpcServer, Service
from rpc.server_config import ServerConfig
from rpc.tracing import TracingConfig
from tests.support.checkpoints import tiny_checkpoint
from tests.support.ports import reserved_port
from tests.support.running_router import RunningRouter, router_config_of, tokenizer
from worker.kv_events.config import KvEventsConfig
from worker.kv_events.publisher import KvEventPublisher
from worker.kv_events.sockets import KvEventSockets
from worker.server import SERVICE_NAMES as WORKER_SERVICES
from worker.server import add_services

__all__ = ["WorkerHere", "running_tiers"]


class WorkerHere:
    """A worker on the tiny checkpoint; keeps its port over restarts.

    Args:
        kv_connector: the URL of its connector.
        role: "prefill" or "decode".
        tracing: where it sends spans.
        variant: its checkpoint.
        kv_events: where it publishes KV events.
    """

    def __init__(
        self,
        kv_connector: str,
        role: str,
        tracing: TracingConfig | None = None,
        variant: str = "llama",
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        self.kv_connector, self.role, self._variant = kv_connector, role, variant
        self._kv_events = kv_events
        self._tracing = tracing or TracingConfig()
        self.engine: AsyncEngine
        self._server: RpcServer
        self._tier: Service
        self.port = reserved_port()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = EngineConfig(
            model=str(tiny_checkpoint(self._variant)),
            served_model_name="tiny",
            dtype="float32",
            max_model_len=256,
            num_gpu_blocks_override=64,
            num_threads=1,
            kv_connector=self.kv_connector,
        )
        self._server = RpcServer(ServerConfig(port=self.port), WORKER_SERVICES)
        await self._server.listen()
        sockets = None if self._kv_events is None else KvEventSockets(self._kv_events)
        self.engine = await AsyncEngine.start(config)
        self.engine.role = Role[self.role.upper()]
        publisher = sockets and KvEventPublisher(sockets, self.engine, "kv@here@tiny")
        self._tier = add_services(self.engine, self._server, self._tracing, publisher)

    async def stop(self) -> None:
        await self._server.stop(0)
        await self._tier.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@asynccontextmanager
async def running_tiers(
    folder: Path,
    *roles: str,
    tracing: TracingConfig | None = None,
    kv_connector: str | Mapping[str, str] = "",
    variant: str = "llama",
    kv_events: Mapping[str, KvEventsConfig] = MappingProxyType({}),
    **router_options: Any,
) -> AsyncIterator[RunningRouter]:
    """Runs one worker of a checkpoint per role, with its KV in the folder unless a connector is
    given, for all or by role, and a router that calls them, with these fields of its config.
    Workers publish KV events if their role has a config of them.
    """
    async with AsyncExitStack() as stack:
        targets: dict[str, tuple[str, ...]] = {"prefill": (), "decode": ()}
        workers = []
        for role in roles:
            url = kv_connector if isinstance(kv_connector, str) else kv_connector[role]
            url = url or f"file://{folder}/kv"
            workers.append(WorkerHere(url, role, tracing, variant, kv_events.get(role)))
            await workers[-1].start()
            stack.push_async_callback(workers[-1].stop)
            targets[role] += (workers[-1].address,)
        tracing = tracing or TracingConfig()
        options = {"model": "tiny", "max_local_prefill_tokens": 0, "tracing": tracing, **targets}
        options |= router_options
        async with _running_router(router_config_of(options), len(roles)) as router:
            router.workers = workers
            yield router


@asynccontextmanager
async def _running_router(config: RouterConfig, num_workers: int) -> AsyncIterator[RunningRouter]:
    security = RouterSecurity(config.security)
    server = RpcServer(config.grpc, SERVICE_NAMES, access_of(config, security))
    await server.listen()
    files = [RouterFiles(tokenizer(), {})] * len(config.models)
    service = RouterService(config, files, server, security)
    await service.start_http()
    try:
        async with open_channel(server.address) as channel:
            router = RunningRouter(service, server, channel)
            await router.until(lambda: len(router.candidate_ids()) == num_workers)
            yield router
    finally:
        await server.stop(0)
        await service.close()
