"""The life of a server: health, reflection, start, drain and stop."""

import asyncio
import json
import os
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from baton.common.errors import (
    ConfigurationError,
    InternalError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
)
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.request import Role
from rpc.channels import open_channel
from rpc.errors import from_rpc_error
from rpc.server import RpcServer, StartInterruptedError, serve
from rpc.server_config import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.rpc_servers import running_server
from worker.server import SERVICE_NAMES, add_services

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status


async def test_a_server_is_not_serving_and_unavailable_until_its_engine_is_ready():
    names = SERVICE_NAMES
    server = RpcServer(ServerConfig(), names)
    await server.listen()
    async with open_channel(server.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        for name in ("", *names):
            assert await health_of(channel, name) == NOT_SERVING
        assert await health_of(channel, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        engine = FakeEngine(Role.BOTH)
        service = add_services(engine, server)
        for name in ("", *names):
            assert await health_of(channel, name) == SERVING
        info = await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        assert info.namespace == engine.namespace
    await server.stop(0)
    await service.close()
    assert engine.is_closed


async def test_unknown_services_have_no_health():
    server = RpcServer(ServerConfig(), ("test.Known",))
    await server.listen()
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "test.Unknown")
        assert isinstance(from_rpc_error(caught.value), NotFoundError)
    await server.stop(0)


async def test_health_watchers_get_every_change_even_when_another_leaves():
    server = RpcServer(ServerConfig(), ())
    await server.listen()
    async with asyncio.timeout(20), open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        leaving, staying = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        for watcher in (leaving, staying):
            assert (await watcher.read()).status == NOT_SERVING
        leaving.cancel()
        server.set_serving(True)
        assert (await staying.read()).status == SERVING
        server.begin_stop()
        assert (await staying.read()).status == NOT_SERVING
        assert await staying.read() is grpc.aio.EOF
        server.set_serving(True)
        assert await health_of(channel) == NOT_SERVING
    await server.stop(0)


async def test_health_answers_while_a_step_is_running():
    """Health runs on the event loop of the handlers, which a busy thread does not block."""
    busy = threading.Event()

    def compute():
        while not busy.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        engine = FakeEngine(Role.PREFILL)
        async with running_server(SERVICE_NAMES, lambda server: add_services(engine, server)) as (
            _,
            channel,
        ):
            statuses = await asyncio.gather(*(health_of(channel) for _ in range(50)))
        assert set(statuses) == {SERVING}
    finally:
        busy.set()
        thread.join()


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_a_client_that_knows_only_reflection_can_call(version):
    async with running_server(
        SERVICE_NAMES, lambda server: add_services(FakeEngine(Role.BOTH), server)
    ) as (server, _):
        services, info = await asyncio.to_thread(call_by_reflection, server.address, version)
    reflection = {f"grpc.reflection.{name}.ServerReflection" for name in ("v1", "v1alpha")}
    assert {*SERVICE_NAMES, "grpc.health.v1.Health", *reflection} <= set(services)
    assert (info.model, info.block_size, info.vocab_size) == ("scripted", 16, 1000)


class ReflectionChannel:
    """A channel whose calls of reflection are of another version. The messages are the same."""

    def __init__(self, channel, version):
        self._channel = channel
        self._version = version

    def stream_stream(self, method, *args, **kwargs):
        renamed = method.replace(".v1alpha.", f".{self._version}.")
        return self._channel.stream_stream(renamed, *args, **kwargs)


def call_by_reflection(address, version):
    """Lists services and calls GetInfo with descriptors that come only from the server."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(ReflectionChannel(channel, version))
        pool = descriptor_pool.DescriptorPool(database)
        services = database.get_services()
        for service in services:
            assert pool.FindServiceByName(service).methods
        method = pool.FindServiceByName("baton.v1.WorkerService").FindMethodByName("GetInfo")
        get_info = channel.unary_unary(
            "/baton.v1.WorkerService/GetInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return services, get_info(message_factory.GetMessageClass(method.input_type)(), timeout=10)


@pytest.mark.parametrize(
    ("num_bytes", "num_calls", "is_refused"),
    [(9000, 40, False), (60_000, 3, False), (66_000, 3, True)],
)
async def test_metadata_up_to_the_limit_is_taken_always_and_above_it_never(
    num_bytes, num_calls, is_refused
):
    """gRPC's own limits let a share of the calls through between 8 and 16 KiB."""
    server = RpcServer(ServerConfig(), ())
    await server.listen()
    metadata = (("authorization", "Bearer " + "x" * (num_bytes - 2000)), ("baggage", "y" * 2000))
    async with open_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for _ in range(num_calls):
            call = check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=10)
            is_exhausted = await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert is_exhausted == is_refused
    await server.stop(0)


RETRIED = {"RESOURCE_EXHAUSTED", "INTERNAL"}


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        (ResourceExhaustedError("full", 0.01), 3),
        (InternalError("a bug"), 1),
        (ResourceExhaustedError("too large", reason=Reason.ANSWER_TOO_LARGE), 1),
    ],
)
async def test_a_retry_policy_obeys_the_server(error, num_calls):
    """Without the trailer the policy would wait for 20 s, or call three times."""
    server = RpcServer(ServerConfig(), ())
    worker = FailingWorker(error)
    server.add_servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker)
    await server.listen()
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "20s",
        "maxBackoff": "20s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": sorted(RETRIED),
    }
    name = {"service": "baton.v1.WorkerService", "method": "GetLoad"}
    config = json.dumps({"methodConfig": [{"name": [name], "retryPolicy": policy}]})
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.service_config", config)]
    ) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=10)
    await server.stop(0)
    assert caught.value.details() == error.message
    assert worker.num_calls == num_calls


class FailingWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Refuses each call with an error."""

    def __init__(self, error):
        self.error = error
        self.num_calls = 0

    async def GetLoad(self, request, context):
        self.num_calls += 1
        raise self.error


async def test_a_port_in_use_is_a_configuration_error():
    first = RpcServer(ServerConfig(), ())
    await first.listen()
    second = RpcServer(ServerConfig(port=first.port), ())
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        await second.listen()
    await first.stop(0)


async def test_the_port_file_contains_the_port(tmp_path):
    path = tmp_path / "port"
    server = RpcServer(ServerConfig(port_file=str(path)), ())
    await server.listen()
    assert path.read_text() == f"{server.port}\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["port"]
    await server.stop(0)
    missing = RpcServer(ServerConfig(port_file=str(tmp_path / "no" / "port")), ())
    with pytest.raises(ConfigurationError, match="port-file"):
        await missing.listen()
    await missing.stop(0)


@pytest.mark.parametrize(
    "changes",
    [{"port": -1}, {"port": 65536}, {"drain_timeout_s": -1.0}, {"shutdown_delay_s": -1.0}],
)
def test_bad_flags_are_named(changes):
    (name,) = changes
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} is"):
        ServerConfig(**changes)


class ScriptedService:
    """A service whose drain ends once `may_end` is set.

    Attributes:
        has_drained: whether the drain has ended by itself.
        stop_announced: set when the server was asked to stop.
    """

    def __init__(self):
        self.stop_announced = asyncio.Event()
        self.drain_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_drained = self.is_closed = False

    def announce_stop(self):
        self.stop_announced.set()

    async def drain(self, timeout_s):
        self.drain_begun.set()
        await self.may_end.wait()
        self.has_drained = True

    async def close(self):
        self.is_closed = True


async def serve_scripted(service, config=None):
    """Starts `serve` in a task; returns the server and the task once the service is ready."""
    started = asyncio.get_running_loop().create_future()

    async def start(server):
        server.set_serving(True)
        started.set_result(server)
        return service

    task = asyncio.create_task(serve(config or ServerConfig(), (), start))
    return await started, task


async def test_a_signal_to_stop_drains_first():
    service = ScriptedService()
    async with asyncio.timeout(20):
        server, task = await serve_scripted(service)
        async with open_channel(server.address) as channel:
            assert await health_of(channel) == SERVING
            os.kill(os.getpid(), signal.SIGTERM)
            await service.drain_begun.wait()
            assert await health_of(channel) == NOT_SERVING
            assert not service.is_closed
        service.may_end.set()
        await task
    assert service.is_closed


async def test_a_delayed_stop_serves_until_its_delay_has_passed():
    service = ScriptedService()
    async with asyncio.timeout(20):
        server, task = await serve_scripted(service, ServerConfig(shutdown_delay_s=0.2))
        async with open_channel(server.address) as channel:
            os.kill(os.getpid(), signal.SIGTERM)
            await service.stop_announced.wait()
            assert not service.drain_begun.is_set()
            assert await health_of(channel) == NOT_SERVING
            assert await health_of(channel, "liveness") == SERVING
        await service.drain_begun.wait()
        service.may_end.set()
        await task
    assert service.has_drained


async def test_an_interrupt_ends_the_delay_of_a_stop():
    service = ScriptedService()
    async with asyncio.timeout(20):
        _, task = await serve_scripted(service, ServerConfig(shutdown_delay_s=3600))
        os.kill(os.getpid(), signal.SIGTERM)
        await service.stop_announced.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await task
    assert service.is_closed
    assert not service.has_drained


@pytest.mark.parametrize("error", [InternalError, TimeoutError])
async def test_a_failure_ends_the_delay_of_a_stop(error):
    service = ScriptedService()
    async with asyncio.timeout(20):
        server, task = await serve_scripted(service, ServerConfig(shutdown_delay_s=3600))
        os.kill(os.getpid(), signal.SIGTERM)
        await service.stop_announced.wait()
        server.fail(error("the engine has died"))
        with pytest.raises(error, match="has died"):
            await task
    assert service.is_closed


async def test_more_sigterms_do_not_end_the_drain():
    service = ScriptedService()
    async with asyncio.timeout(20):
        server, task = await serve_scripted(service)
        async with open_channel(server.address) as channel:
            os.kill(os.getpid(), signal.SIGTERM)
            await service.drain_begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await health_of(channel) == NOT_SERVING
        service.may_end.set()
        await task
    assert service.has_drained


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_sigint_ends_the_drain(first):
    service = ScriptedService()
    async with asyncio.timeout(20):
        _, task = await serve_scripted(service)
        os.kill(os.getpid(), first)
        await service.drain_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await task
    assert service.is_closed
    assert not service.has_drained


async def test_a_signal_during_the_start_stops_the_server():
    begun = asyncio.Event()

    async def start(server):
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        task = asyncio.create_task(serve(ServerConfig(), (), start))
        await begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StartInterruptedError):
            await task


async def test_a_service_that_dies_ends_the_server_with_its_error():
    engine = FakeEngine(Role.DECODE)

    async def start(server):
        service = add_services(engine, server)
        engine.die(RuntimeError("the engine loop died"))
        return service

    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="the engine loop died"):
            await serve(ServerConfig(), SERVICE_NAMES, start)
    assert engine.is_closed


def test_calls_that_a_failure_cuts_off_leave_the_log_to_the_error(caplog):
    names, followers = ("baton.v1.WorkerService",), ThreadPoolExecutor()

    def follow(port, is_watching):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad
            loads = watch(worker_pb2.WatchLoadRequest(), timeout=20)
            next(loads)
            is_watching.set()
            with pytest.raises(grpc.RpcError):
                deque(loads, maxlen=0)

    async def start(server):
        engine, is_watching = FakeEngine(Role.BOTH), threading.Event()
        service = add_services(engine, server)
        followed.append(followers.submit(follow, server.port, is_watching))
        assert await asyncio.to_thread(is_watching.wait, 20)
        server.fail(RuntimeError("the engine is lost"))
        return service

    followed = []
    with followers, pytest.raises(RuntimeError, match="the engine is lost"):
        asyncio.run(serve(ServerConfig(), names, start))
    followed[0].result()
    assert "CancelledError" not in caplog.text
