"""Routers that restart one after the other, under plain clients that know both: no call fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.v1 import generation_pb2_grpc
from tests.support.cluster import ServerProcess
from tests.support.fake_workers import MODEL, FakeDecode, running_workers
from tests.support.running_router import request, script_of, text_of
from tests.support.tokenizer_folders import write_byte_level_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TEXT = "the quick brown fox"
CALLS_PER_S = 5


@asynccontextmanager
async def running_routers(folder: Path, decode: FakeDecode) -> AsyncIterator[list[ServerProcess]]:
    model = write_byte_level_folder(folder / MODEL)
    flags = ["--model", str(model), "--decode", decode.address]
    routers = [ServerProcess("router", folder, f"router{index}", flags) for index in range(2)]
    try:
        await asyncio.gather(*(router.wait_serving() for router in routers))
        yield routers
    finally:
        for router in routers:
            router.kill()


async def call_often(targets: Sequence[str], has_ended: asyncio.Event) -> list[str]:
    """Makes calls until the event; returns the errors. Without any options the channel stays on
    the first router that takes the connection.
    """
    errors: list[str] = []
    async with grpc.aio.insecure_channel(f"ipv4:{','.join(targets)}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def call(number: int) -> None:
            message = request("hello", max_tokens=len(script_of(TEXT)))
            try:
                if number % 2:
                    responses = [r async for r in stub.GenerateStream(message, timeout=20)]
                    assert text_of(responses) == TEXT
                else:
                    response = await stub.Generate(message, timeout=20)
                    assert response.completions[0].text == TEXT
            except grpc.aio.AioRpcError as error:
                errors.append(f"{number}: {error.code().name} {error.details()}")

        async with asyncio.TaskGroup() as calls:
            number = 0
            while not has_ended.is_set():
                number += 1
                calls.create_task(call(number))
                await asyncio.sleep(1 / CALLS_PER_S)
    return errors


async def test_no_call_fails_while_two_routers_restart(tmp_path):
    decode = FakeDecode(script_of(TEXT))
    async with running_workers(decode), running_routers(tmp_path, decode) as routers:
        targets, has_ended = [router.address for router in routers], asyncio.Event()
        clients = [
            asyncio.create_task(call_often(order, has_ended))
            for order in (targets, targets[::-1])
            for _ in range(2)
        ]
        for router in routers:
            assert await asyncio.to_thread(router.stop) == 0
            await router.restart()
        await asyncio.sleep(1)
        has_ended.set()
        assert await asyncio.gather(*clients) == [[]] * len(clients)
