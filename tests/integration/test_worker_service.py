"""WorkerService over a scripted engine, and the retries of its methods by channels."""

import asyncio

import grpc
import pytest

from baton.common.errors import UnavailableError
from baton.v1 import prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared
from engine.request import Role
from kvstore.guard.status import BackendStatus
from rpc.channels import open_channel
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.requests import engine_request
from tests.support.rpc_servers import prefill_request, running_server
from worker.server import SERVICE_NAMES, add_services


@pytest.fixture
async def engine():
    return FakeEngine(Role.PREFILL)


@pytest.fixture
def tiers():
    return []


@pytest.fixture
async def served(engine, tiers):
    def start(server):
        tiers.append(add_services(engine, server))
        return tiers[0]

    async with running_server(SERVICE_NAMES, start) as (server, channel):
        yield server, channel


@pytest.fixture
async def worker(served):
    return worker_pb2_grpc.WorkerServiceStub(served[1])


async def test_info_and_load_are_those_of_the_engine(worker, engine):
    info = await worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
    assert info.role == worker_pb2.WORKER_ROLE_PREFILL
    assert (info.namespace, info.num_blocks, info.kv_connector) == (engine.namespace, 64, "memory")
    assert list(info.eos_token_ids) == [2]
    assert (info.kv_dtype, info.model_fingerprint, info.layout_version) == ("float32", "66", 1)
    assert info.kv_form == engine.form.describe(b"f")
    assert (info.block_size, info.pool_block_size) == (16, 16)
    # 64 blocks of 16 tokens hold more than the 512 that the model takes.
    assert (info.max_pool_tokens, info.max_num_seqs) == (512, 64)
    assert info.worker_id
    engine.num_running = 3
    engine.kv_backends = [BackendStatus("KV store redis://cache:6379/0", "an id")]
    answer = await worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=10)
    (backend,), load = answer.kv_backends, answer.load
    assert (backend.identity, backend.can_load, list(load.kv_store_ids)) == (
        "an id",
        True,
        ["an id"],
    )
    assert (load.num_running, load.num_free_blocks, load.draining) == (3, 64, False)


async def test_watchers_get_the_load_now_and_at_each_change(worker, engine):
    async with asyncio.timeout(10):
        watch = worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=1))
        assert (await watch.read()).load.num_running == 0
        for num_running in (1, 2):
            engine.num_running = num_running
            assert (await watch.read()).load.num_running == num_running
        watch.cancel()


async def test_watchers_get_heartbeats_without_a_change(worker):
    async with asyncio.timeout(10):
        # Between two heartbeats the load is asked for dozens of times, on a busy machine a few.
        watch = worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=5))
        loads = [await watch.read() for _ in range(3)]
        watch.cancel()
    ages = [load.load.age_s for load in loads]
    for load in loads:
        load.load.ClearField("age_s")
    assert loads[0] == loads[1] == loads[2]
    assert min(ages[1] - ages[0], ages[2] - ages[1]) > 2  # its growth is no change


async def test_an_interval_of_zero_is_refused(worker):
    with pytest.raises(grpc.aio.AioRpcError, match="interval_ms is 0"):
        await worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=0), timeout=10).read()


async def test_abort_ends_requests_with_a_reason(served, worker, engine):
    stub = prefill_pb2_grpc.PrefillServiceStub(served[1])
    call = stub.Prefill(prefill_request("r"), timeout=20)
    async with asyncio.timeout(10):
        await engine.until(lambda: "r" in engine.live)
    answer = await worker.Abort(worker_pb2.AbortRequest(request_ids=["r", "unknown"]), timeout=10)
    assert answer.num_aborted == 1
    candidates = (await call.read()).result.outputs
    assert [candidate.finish_reason for candidate in candidates] == [3]  # ABORTED


@pytest.mark.parametrize(
    ("named", "ended"),
    [
        (["c/0123456789abcdef"], {"c/0123456789abcdef"}),
        (["c"], {"c/0123456789abcdef", "c/fedcba9876543210/12"}),
        (["c/d", "c/0123456789abcdef"], {"c/d/0000000000000000", "c/0123456789abcdef"}),
        (["", "/", "d", "c/", "c/fedcba9876543210/1", "0123456789abcdef"], set()),
    ],
)
async def test_abort_accepts_request_ids_of_routers_and_of_clients(worker, engine, named, ended):
    ids = {"c/0123456789abcdef", "c/fedcba9876543210/12", "c/d/0000000000000000", "cc", "c/x/1"}
    for request_id in ids:
        engine.submit(engine_request(request_id, (5,)), lambda output: None)
    answer = await worker.Abort(worker_pb2.AbortRequest(request_ids=named), timeout=10)
    assert answer.num_aborted == len(ended)
    assert set(engine.live) == ids - ended


async def test_drain_waits_and_turns_health_off(served, worker, engine):
    server, channel = served
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    call = stub.Prefill(prefill_request("r"), timeout=20)
    async with asyncio.timeout(10):
        await engine.until(lambda: "r" in engine.live)
    draining = await worker.Drain(worker_pb2.DrainRequest(timeout_ms=0), timeout=10)
    assert draining.num_remaining == 1
    assert not server.is_serving
    call_too_late = stub.Prefill(prefill_request("s"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_too_late.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    waiting = worker.Drain(worker_pb2.DrainRequest(), timeout=20)
    engine.abort(["r"], notify=True)
    assert (await waiting).num_remaining == 0
    assert (await call.read()).HasField("result")


async def test_the_prefix_cache_is_reset(worker, engine):
    engine.num_cached_blocks = 7
    answer = await worker.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=10)
    assert (answer.num_blocks, engine.num_cached_blocks) == (7, 0)


async def test_followers_of_the_prefix_cache_get_its_events(worker, engine):
    async with asyncio.timeout(10):
        watch = worker.WatchKvEvents(worker_pb2.WatchKvEventsRequest())
        engine.events.put_nowait((CacheCleared(1), BlocksStored(2, (b"k",), None)))
        cleared, stored = (await watch.read()).events
        assert (cleared.sequence_number, cleared.WhichOneof("event")) == (1, "cleared")
        assert (stored.sequence_number, list(stored.stored.keys)) == (2, [b"k"])
        assert not stored.stored.HasField("parent")
        engine.events.put_nowait((BlocksRemoved(3, (b"k",)),))
        assert list((await watch.read()).events[0].removed.keys) == [b"k"]
        watch.cancel()
        await engine.until(lambda: engine.num_followers == 0)


async def test_following_the_prefix_cache_ends_with_the_worker(served, worker, engine, tiers):
    async with asyncio.timeout(10):
        watch = worker.WatchKvEvents(worker_pb2.WatchKvEventsRequest())
        engine.events.put_nowait((CacheCleared(1),))
        await watch.read()
        await tiers[0].drain(5)
        assert await watch.read() is grpc.aio.EOF
        assert engine.num_followers == 0


class FlakyWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Fails the first call of every method."""

    def __init__(self):
        self.calls = []

    async def GetInfo(self, request, context):
        return self._answer("GetInfo", worker_pb2.GetInfoResponse())

    async def Drain(self, request, context):
        return self._answer("Drain", worker_pb2.DrainResponse())

    def _answer(self, method, answer):
        self.calls.append(method)
        if self.calls.count(method) == 1:
            raise UnavailableError("not now")
        return answer


async def test_channels_retry_only_the_listed_methods():
    flaky = FlakyWorker()
    server = RpcServer(ServerConfig(), SERVICE_NAMES)
    server.add_servicer(worker_pb2_grpc.add_WorkerServiceServicer_to_server, flaky)
    await server.listen()
    async with open_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Drain(worker_pb2.DrainRequest(), timeout=10)
    assert flaky.calls == ["GetInfo", "GetInfo", "Drain"]
    await server.stop(0)
