"""A router and real engines on a tiny checkpoint, all in this process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import decode_service.server
import prefill_service.server
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
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

TIERS = {"prefill": prefill_service.server, "decode": decode_service.server}


@asynccontextmanager
async def running_tiers(
    folder: Path, *roles: str, tracing: TracingConfig | None = None
) -> AsyncIterator[RunningRouter]:
    """Runs one worker per role, with its KV in the folder, and a router that calls them."""
    tracing = tracing or TracingConfig()
    async with AsyncExitStack() as stack:
        targets: dict[str, tuple[str, ...]] = {"prefill": (), "decode": ()}
        for role in roles:
            worker = _running_worker(folder, role, tracing)
            targets[role] += (await stack.enter_async_context(worker),)
        options = {"model": "tiny", "max_local_prefill_tokens": 0, "tracing": tracing, **targets}
        yield await stack.enter_async_context(_running_router(router_config_of(options)))


@asynccontextmanager
async def _running_worker(folder: Path, role: str, tracing: TracingConfig) -> AsyncIterator[str]:
    config = EngineConfig(
        model=str(tiny_checkpoint("llama")),
        served_model_name="tiny",
        role=role,
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        num_threads=1,
        kv_connector=f"file://{folder}/kv",
    )
    server = RpcServer(ServerConfig(), TIERS[role].SERVICE_NAMES)
    await server.listen()
    tier = TIERS[role].add_services(await AsyncEngine.start(config), server, tracing)
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
    service = RouterService(config, [RouterFiles(tokenizer(), {})], server, security)
    await service.start_http()
    (model,) = config.models
    num_workers = len(model.prefill) + len(model.decode)
    try:
        async with open_channel(server.address) as channel:
            router = RunningRouter(service, server, channel)
            await router.until(lambda: len(router.candidate_ids()) == num_workers)
            yield router
    finally:
        await server.stop(0)
        await service.close()
