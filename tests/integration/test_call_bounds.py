"""Calls without an end take no place of short ones, connections end at their age, and a server that
takes no more calls says so to its clients.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.request import Role
from rpc import places
from rpc.channels import SERVER_OPTIONS, open_channel
from rpc.server import RpcServer
from rpc.server_access import ConnectionAge, ServerAccess
from rpc.server_config import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.raw_grpc import RawConnection
from worker.server import SERVICE_NAMES, add_services

WATCH = "/grpc.health.v1.Health/Watch"
NOT_ENDED = health_pb2.HealthCheckRequest()


@asynccontextmanager
async def serving(**access: object) -> AsyncIterator[RpcServer]:
    server = RpcServer(ServerConfig(), SERVICE_NAMES, ServerAccess(**access))
    await server.listen()
    service = add_services(FakeEngine(Role.BOTH), server)
    try:
        yield server
    finally:
        await server.stop(0)
        await service.close()


async def until(condition) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in 20 s")


async def refusal_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


async def first_of_next(start, channel: grpc.aio.Channel):
    """The first message of another call, once there is a place for it."""
    while True:
        try:
            return await anext(aiter(start(channel)))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise


async def check_short_calls(channel: grpc.aio.Channel) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(NOT_ENDED, timeout=10)
    await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(
        worker_pb2.GetInfoRequest(), timeout=10
    )


def watch(channel: grpc.aio.Channel):
    return health_pb2_grpc.HealthStub(channel).Watch(NOT_ENDED)


def reflect(channel: grpc.aio.Channel):
    async def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.Event().wait()

    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())


@pytest.mark.parametrize(
    ("start", "name"), [(watch, "3 health watches"), (reflect, "3 reflection streams")]
)
async def test_endless_calls_take_no_places_of_short_ones(start, name, monkeypatch):
    """Each kind is full, and so are the others' places but for one."""
    monkeypatch.setattr(places, "_MAX_REFLECTION_STREAMS", 3)
    monkeypatch.setattr(places, "_MAX_HEALTH_CALLS", 1)
    async with (
        serving(max_connections=3, max_concurrent_calls=1) as server,
        open_channel(server.address) as channel,
    ):
        streams = [start(channel) for _ in range(3)]
        for stream in streams:
            assert await anext(aiter(stream))
        refused = await refusal_of(start(channel))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert name in refused.details()
        await check_short_calls(channel)
        streams[0].cancel()
        assert await first_of_next(start, channel)


async def test_calls_whose_requests_do_not_come_make_room_for_others(monkeypatch):
    monkeypatch.setattr(places, "_MAX_HEALTH_CALLS", 3)
    async with (
        serving(max_concurrent_calls=3) as server,
        RawConnection.open(server.port) as silent,
        open_channel(server.address) as channel,
    ):
        for method in ("/grpc.health.v1.Health/Check", "/baton.v1.WorkerService/GetInfo"):
            num_ended = len(silent.headers)
            for _ in range(4):
                silent.call(method)
            await until(lambda n=num_ended: len(silent.headers) == n + 1)  # the first of them
            assert b"at the same time" in silent.headers[-1]
            await check_short_calls(channel)
            await until(lambda n=num_ended: len(silent.headers) == n + 2)  # made room for one


async def test_a_connection_of_full_age_is_left_and_its_calls_go_on():
    async with (
        serving(connection_age=ConnectionAge(0.1, 60)) as server,
        RawConnection.open(server.port) as connection,
    ):
        connection.call(WATCH, NOT_ENDED)
        await until(lambda: 0 in connection.goaways)
        num_before = len(connection.headers)
        server.begin_stop()
        await until(lambda: len(connection.headers) > num_before)  # the status of its end


async def test_calls_on_a_connection_of_full_age_have_a_grace():
    async with (
        serving(connection_age=ConnectionAge(0.1, 0.1)) as server,
        RawConnection.open(server.port) as connection,
    ):
        connection.call(WATCH, NOT_ENDED)
        await until(lambda: not connection.is_open)


async def test_a_server_that_takes_no_more_calls_lets_its_clients_go():
    async with serving() as server, RawConnection.open(server.port) as connection:
        connection.call("/baton.v1.WorkerService/WatchLoad", worker_pb2.WatchLoadRequest())
        await until(lambda: connection.headers)
        await server.refuse_new()
        await until(lambda: 0 in connection.goaways)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert connection.is_open
        assert server.num_calls == 1
        connection.cancel(1)
        await until(lambda: not server.num_calls)


def test_pings_of_each_second_are_taken():
    """Clients of other libraries send some that often; further ones end the connection."""
    options = dict(SERVER_OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 1000
    assert options["grpc.keepalive_permit_without_calls"] == 1
