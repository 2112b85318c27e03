"""A router and real engines on a tiny checkpoint, all in this process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.request import Role
from router.config import RouterConfig
from router.models import RouterFiles
from router.security import RouterSecurity
from router.server import SERVICE_NAMES, RouterService, access_of
from rpc.channels import open_channel
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from rpc.tracing import TracingConfig
from tests.support.checkpoints import tiny_checkpoint
from tests.support.running_router import RunningRouter, router_config_of, tokenizer
from worker.server import SERVICE_NAMES as WORKER_SERVICES
from worker.server import add_services


@asynccontextmanager
async def running_tiers(
    folder: Path,
    *roles: str,
    tracing: TracingConfig | None = None,
    kv_connector: str = "",
    **router_options: Any,
) -> AsyncIterator[RunningRouter]:
    """Runs one worker per role, with its KV in the folder unless a connector is given, and a router
    that calls them, with these fields of its config.
    """
    kv_connector = kv_connector or f"file://{folder}/kv"
    tracing = tracing or TracingConfig()
    async with AsyncExitStack() as stack:
        targets: dict[str, tuple[str, ...]] = {"prefill": (), "decode": ()}
        for role in roles:
            worker = _running_worker(kv_connector, role, tracing)
            targets[role] += (await stack.enter_async_context(worker),)
        options = {"model": "tiny", "max_local_prefill_tokens": 0, "tracing": tracing, **targets}
        options |= router_options
        yield await stack.enter_async_context(_running_router(router_config_of(options)))


@asynccontextmanager
async def _running_worker(
    kv_connector: str, role: str, tracing: TracingConfig
) -> AsyncIterator[str]:
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        served_model_name="tiny",
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        num_threads=1,
        kv_connector=kv_connector,
    )
    server = RpcServer(ServerConfig(), WORKER_SERVICES)
    await server.listen()
    engine = await AsyncEngine.start(config)
    engine.role = Role[role.upper()]
    tier = add_services(engine, server, tracing)
    try:
        yield server.address
    finally:
        await server.stop(0)
        await tier.close()


@asynccontextmanager
async def _running_router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    security = RouterSecurity(config.security)
    server = RpcServer(config.grpc, SERVICE_NAMES, access_of(config, security))
    await server.listen()
    files = [RouterFiles(tokenizer(), {})] * len(config.models)
    service = RouterService(config, files, server, security)
    await service.start_http()
    model = config.models[0]
    num_workers = len(model.prefill) + len(model.decode)
    try:
        async with open_channel(server.address) as channel:
            router = RunningRouter(service, server, channel)
            await router.until(lambda: len(router.candidate_ids()) == num_workers)
            yield router
    finally:
        await server.stop(0)
        await service.close()
