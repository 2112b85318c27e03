"""Calls of a worker that does not answer: it is lost, or the caller leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.common.errors import UnavailableError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import worker_pb2_grpc
from router.fleet.worker_calls import WorkerCalls
from rpc.channels import open_channel


class SilentWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that answers nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetLoad(self, request, context):
        self.asked.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def silent_call() -> AsyncIterator[tuple[grpc.aio.Channel, "asyncio.Task[object]"]]:
    """A call that a worker has got, and its channel."""
    server, worker = grpc.aio.server(), SilentWorker()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            calls = WorkerCalls(channel, ClusterSecurity())
            task = asyncio.create_task(calls.get_load(60.0))
            await worker.asked.wait()
            yield channel, task
    finally:
        await server.stop(None)


async def test_a_call_whose_channel_is_closed_does_not_cancel_its_caller():
    async with silent_call() as (channel, task):
        await channel.close()
        with pytest.raises(UnavailableError, match="lost"):
            await task


async def test_a_caller_that_is_cancelled_stays_so():
    async with silent_call() as (_, task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
