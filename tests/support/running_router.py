"""A whole router in this process, with fake workers and a client."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.chat.template import ChatTemplate
from router.config.http import HttpConfig
from router.config.router import RouterConfig
from router.config.served_model import ServedModelConfig
from router.models import Models, RouterFiles
from router.requests.tokenizer import Tokenizer
from router.security import RouterSecurity
from router.server import SERVICE_NAMES, RouterService, access_of
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
    """The router's parts that tests look at, and a stub of its service.

    Attributes:
        workers: those that run with it, if a test may restart them.
    """

    workers: Sequence[Any] = ()

    def __init__(self, service: RouterService, server: RpcServer, channel: grpc.aio.Channel):
        self.service = service
        self.model = next(iter(service.models))
        self.fleet = self.model.fleet
        self.server = server
        self.channel = channel
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition on the fleet."""
        async with asyncio.timeout(60):
            while not condition():
                await wait_for_any_change(self.service.models)

    async def until_connected(self, *workers: FakeWorker) -> None:
        worker_ids = {worker.info.worker_id for worker in workers}
        await self.until(lambda: worker_ids <= self.candidate_ids())

    def candidate_ids(self) -> set[str]:
        replicas = (*self.fleet.prefill.candidates, *self.fleet.decode.candidates)
        return {replica.replica_id for replica in replicas}

    async def generate(
        self, message: generation_pb2.GenerateRequest, timeout_s: float | None = 90
    ) -> list[generation_pb2.GenerateStreamResponse]:
        """Generates; returns all messages of the stream."""
        stream = self.stub.GenerateStream(message, timeout=timeout_s)
        return [response async for response in stream]


@asynccontextmanager
async def running_router(
    *workers: FakeWorker,
    default_params: Mapping[str, Any] | None = None,
    chat_template: ChatTemplate | None = None,
    tokenizer_settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[RunningRouter]:
    """Runs a router that is connected to these workers, which the caller has started."""
    targets = {
        "prefill": tuple(w.address for w in workers if isinstance(w, FakePrefill)),
        "decode": tuple(w.address for w in workers if isinstance(w, FakeDecode)),
    }
    router_config = router_config_of({"model": MODEL, **targets, **config})
    security = RouterSecurity(router_config.security)
    server = RpcServer(router_config.grpc, SERVICE_NAMES, access_of(router_config, security))
    await server.listen()
    files = RouterFiles(
        tokenizer(), default_params or {}, chat_template, "", tokenizer_settings or {}
    )
    service = RouterService(router_config, [files] * len(router_config.models), server, security)
    await service.start_http()
    try:
        async with open_channel(server.address) as channel:
            router = RunningRouter(service, server, channel)
            await router.until_connected(*workers)
            yield router
    finally:
        await server.stop(0)
        if service.http is not None:
            await service.http.stop(0)
        await service.close()


def router_config_of(options: Mapping[str, Any]) -> RouterConfig:
    """Returns the config of a router without HTTP, from fields of both configs.

    `more_models` are served after the one that the other fields describe.
    """
    options = dict(options)
    more_models = options.pop("more_models", ())
    names = {field.name for field in fields(ServedModelConfig)}
    model = {name: value for name, value in options.items() if name in names}
    router = {name: value for name, value in options.items() if name not in names}
    servers = {"grpc": ServerConfig(), "http": HttpConfig(port=None)}
    return RouterConfig(models=(ServedModelConfig(**model), *more_models), **(servers | router))


async def wait_for_any_change(models: Models) -> None:
    """Returns when a replica of any model has started or stopped taking requests."""
    waits = [asyncio.ensure_future(model.fleet.wait_for_change()) for model in models]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=1)
    for wait in waits:
        wait.cancel()


async def failed_call(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """Awaits a call that must fail; returns its error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def token_ids_of(responses: Sequence[generation_pb2.GenerateStreamResponse]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


def text_of(responses: Sequence[generation_pb2.GenerateStreamResponse]) -> str:
    return "".join(response.text for response in responses)
