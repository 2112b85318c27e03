"""In-process gRPC servers on free ports, and requests for them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from baton.v1 import common_pb2, prefill_pb2
from rpc.channels import open_channel
from rpc.server import RpcServer, Service
from rpc.server_config import ServerConfig
from tests.support.fake_engine import NAMESPACE


@asynccontextmanager
async def running_server(
    service_names: Sequence[str], start: Callable[[RpcServer], Service]
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    """A listening server with a started service, and a channel to it."""
    server = RpcServer(ServerConfig(), service_names)
    await server.listen()
    service = start(server)
    try:
        async with open_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.stop(0)
        await service.close()


def worker_request(request_id: str, **changes: object) -> prefill_pb2.WorkerRequest:
    fields = {
        "request_id": request_id,
        "namespace": NAMESPACE,
        "prompt_token_ids": [5, 6, 7],
        "sampling": common_pb2.SamplingParams(temperature=0.0, seed=1),
        "max_tokens": 8,
    }
    return prefill_pb2.WorkerRequest(**{**fields, **changes})
