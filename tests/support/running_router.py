"""A whole router in this process, with fake workers and a client."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.config import RouterConfig
from router.server import SERVICE_NAMES, RouterService
from router.tokenizer import Tokenizer
from rpc.channels import open_channel
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from tests.support.fake_workers import MODEL, FakeDecode, FakePrefill, FakeWorker
from tests.support.tokenizer_folders import write_byte_level_folder

PROMPT_IDS = tuple(range(100, 140))
"""40 tokens: long enough for a remote prefill."""


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_byte_level_folder(Path(folder)))


def script_of(text: str) -> list[int]:
    """Returns the tokens of a text."""
    return tokenizer().encode(text, add_special_tokens=False)


def request(
    prompt: str | Sequence[int] = PROMPT_IDS, *, request_id: str = "", **stopping: Any
) -> generation_pb2.GenerateRequest:
    """Returns a greedy request; keywords are fields of `StoppingParams`."""
    message = generation_pb2.GenerateRequest(
        request_id=request_id,
        sampling=common_pb2.SamplingParams(temperature=0.0),
        stopping=common_pb2.StoppingParams(**stopping),
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


class RunningRouter:
    """The router's parts that tests look at, and a stub of its service."""

    def __init__(self, service: RouterService, server: RpcServer, channel: grpc.aio.Channel):
        self.service = service
        self.server = server
        self.channel = channel
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition on the fleet."""
        async with asyncio.timeout(20):
            while not condition():
                await self.service.fleet.wait_for_change()

    async def until_connected(self, *workers: FakeWorker) -> None:
        wanted = {worker.info.worker_id for worker in workers}
        await self.until(lambda: wanted <= self.candidate_ids())

    def candidate_ids(self) -> set[str]:
        fleet = self.service.fleet
        replicas = (*fleet.prefill.candidates, *fleet.decode.candidates)
        return {replica.replica_id for replica in replicas}

    async def generate(
        self, message: generation_pb2.GenerateRequest, timeout_s: float | None = 30
    ) -> list[generation_pb2.GenerateStreamResponse]:
        """Generates; returns all messages of the stream."""
        stream = self.stub.GenerateStream(message, timeout=timeout_s)
        return [response async for response in stream]


@asynccontextmanager
async def running_router(
    *workers: FakeWorker, default_params: Mapping[str, Any] | None = None, **config: Any
) -> AsyncIterator[RunningRouter]:
    """Runs a router that is connected to these workers, which the caller has started."""
    options = {
        "prefill": tuple(w.address for w in workers if isinstance(w, FakePrefill)),
        "decode": tuple(w.address for w in workers if isinstance(w, FakeDecode)),
        "model": MODEL,
        "server": ServerConfig(),
    }
    server = RpcServer(ServerConfig(), SERVICE_NAMES)
    await server.listen()
    router_config = RouterConfig(**(options | config))
    service = RouterService(router_config, tokenizer(), default_params or {}, server)
    try:
        async with open_channel(server.address) as channel:
            router = RunningRouter(service, server, channel)
            await router.until_connected(*workers)
            yield router
    finally:
        await server.stop(0)
        await service.close()


def token_ids_of(responses: Sequence[generation_pb2.GenerateStreamResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


def text_of(responses: Sequence[generation_pb2.GenerateStreamResponse]) -> str:
    return "".join(response.text for response in responses)
