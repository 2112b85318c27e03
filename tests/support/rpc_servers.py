"""In-process gRPC servers on free ports, and requests for them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from baton.v1 import common_pb2, prefill_pb2, request_pb2
from rpc.channels import open_channel
from rpc.server import RpcServer, Service
from rpc.server_config import ServerConfig
from tests.support.fake_engine import NAMESPACE


@asynccontextmanager
async def running_server(
    service_names: Sequence[str], start: Callable[[RpcServer], Service]
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    """Runs a listening server with a started service; yields it and a channel to it."""
    server = RpcServer(ServerConfig(), service_names)
    await server.listen()
    service = start(server)
    try:
        async with open_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.stop(0)
        await service.close()


def spec_message(
    request_id: str, *, max_tokens: int = 8, timeout_ms: int = 20_000, **changes: object
) -> request_pb2.RequestSpec:
    fields = {
        "request_id": request_id,
        "prompt_token_ids": [5, 6, 7],
        "sampling": common_pb2.SamplingParams(temperature=0.0, seed=1),
        "stopping": common_pb2.StoppingParams(max_tokens=max_tokens),
        "timeout_ms": timeout_ms,
    }
    return request_pb2.RequestSpec(**{**fields, **changes})


def prefill_request(
    request_id: str, *, namespace: bytes = NAMESPACE, **changes: object
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(spec=spec_message(request_id, **changes), namespace=namespace)
