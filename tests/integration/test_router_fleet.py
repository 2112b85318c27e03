"""The replicas that a router uses: discovery, checks, health and replacement."""

import asyncio
import logging
import socket
import time
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.common.request.sampling_params import SamplingParams
from baton.common.security.cluster import ClusterSecurity
from router.config.served_model import ServedModelConfig
from router.fleet import tier as tier_module
from router.fleet.fleet import Fleet
from router.generation_wire import request_from_proto
from router.observe.request_record import RequestRecord
from router.requests.request import SpecMaker, prepare_request
from router.routing.cache_index import CacheIndex
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings
from router.stages.continuation import HeldHandoff, Progress
from router.stages.decode_stage import DecodeStage
from router.stages.placement import Placement
from router.stages.pulling import PrefixPulls
from tests.support.fake_workers import (
    Changes,
    FakeDecode,
    FakePrefill,
    first_of,
    running_workers,
)
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    token_ids_of,
    tokenizer,
)

SCRIPT = [50 + i % 200 for i in range(100)]


class RouterLog(logging.Handler):
    """A log handler that records the router's messages and can wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._changes = Changes()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self._changes.notify()

    async def until(self, text: str) -> None:
        await self._changes.until(lambda: any(text in r.getMessage() for r in self.records))


@pytest.fixture
def router_log(caplog):
    caplog.set_level(logging.INFO, logger="baton.router")
    handler, logger = RouterLog(), logging.getLogger("baton.router")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "difference",
    [
        {"namespace": b"another"},
        {"block_size": 8},
        {"vocab_size": 7},
        {"eos_token_ids": [9]},
        {"kv_connector": "redis"},
        {"model": "another"},
        {"kv_dtype": "float16", "namespace": b"another"},
        {"model_fingerprint": "fedcba9876543210", "namespace": b"another"},
        {"layout_version": 2, "namespace": b"another", "version": "0.0.9"},
    ],
    ids=lambda difference: next(iter(difference)),
)
async def test_a_replica_that_differs_is_refused_with_an_error_log_and_never_used(
    difference, router_log
):
    decode = FakeDecode(SCRIPT)
    stranger = FakePrefill(SCRIPT, **difference)
    async with running_workers(decode, stranger):
        await stranger.stop()
        async with running_router(decode, prefill=(stranger.address,)) as router:
            await stranger.start()  # the first to connect sets the model
            await router_log.until("REFUSED")
            await router.generate(request(max_tokens=3))
    assert not stranger.requests
    refusals = [record for record in router_log.records if "REFUSED" in record.getMessage()]
    assert {record.levelno for record in refusals} == {logging.ERROR}
    named = refusals[0].getMessage()
    field = next(iter(difference))
    assert f"{field} " in named
    if field != "namespace":  # a digest does not help an operator
        assert "namespace" not in named
    assert ("it is Baton 0.0.9, the cluster's is test" in named) == ("version" in difference)


async def test_a_worker_of_another_version_with_the_same_formats_serves():
    decode, older = FakeDecode(SCRIPT), FakePrefill(SCRIPT, version="0.0.9")
    async with (
        running_workers(decode, older),
        running_router(decode, prefill=(older.address,)) as router,
    ):
        await router.until_connected(older)
        await router.generate(request(max_tokens=3))
    assert older.requests


async def test_a_replica_serves_in_the_tier_of_its_role():
    decode, misplaced = FakeDecode(SCRIPT), FakeDecode(SCRIPT)
    async with (
        running_workers(decode, misplaced),
        running_router(decode, prefill=(misplaced.address,)) as router,
    ):
        await router.until(lambda: len(router.fleet.decode.candidates) == 2)
        assert not router.fleet.prefill.connected
        assert not router.fleet.prefill.problems


async def test_one_worker_behind_two_addresses_is_used_once(router_log, quick_retries):
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode):
        addresses = (decode.address, f"localhost:{decode.port}")
        async with running_router(decode, decode=addresses) as router:
            await router_log.until("its worker is connected already")
            for _ in range(5):
                await router.generate(request(max_tokens=3))
            assert len(router.fleet.decode.connected) == 1
            assert decode.num_connects == 1
            # The router keeps trying both addresses.
            await decode.stop()
            successor = await FakeDecode(SCRIPT).start(decode.port)
            await router.until_connected(successor)
            await router.generate(request(max_tokens=3))
            await successor.stop()
    levels = {r.levelno for r in router_log.records if "connected already" in r.getMessage()}
    assert levels == {logging.INFO}


async def test_dropping_a_workers_second_address_keeps_its_prefixes(
    router_log, quick_retries, monkeypatch
):
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    resolver = FakeResolver(monkeypatch)
    resolver.hosts = None
    async with running_workers(prefill, decode):
        targets = (decode.address, f"dns:///decode.test:{decode.port}")
        async with running_router(prefill, decode, decode=targets, dns_interval_s=0.02) as router:
            resolver.hosts = ["localhost"]
            await router_log.until("its worker is connected already")
            await router.generate(request(max_tokens=2))
            resolver.hosts = ["127.0.0.9"]
            await resolver.resolved_again()
            await resolver.resolved_again()
            await router.generate(request(max_tokens=2))
    assert len(prefill.requests) == 1  # the second was cached on decode


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(tier_module, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(tier_module, "_MAX_BACKOFF_S", 0.001)


@pytest.mark.parametrize("is_prefill_first", [True, False])
async def test_a_prefill_replica_that_differs_never_excludes_decode(is_prefill_first, router_log):
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT, kv_connector="")
    first, second = (prefill, decode) if is_prefill_first else (decode, prefill)
    async with running_workers(prefill, decode):
        targets = {"prefill": (prefill.address,), "decode": (decode.address,)}
        await second.stop()
        async with running_router(first, **targets) as router:
            await second.start()
            await router_log.until("REFUSED")
            await router.until_connected(decode)
            responses = await router.generate(request(max_tokens=3))
            assert router.candidate_ids() == {decode.info.worker_id}
    assert token_ids_of(responses) == SCRIPT[:3]
    assert not prefill.requests
    (refusal,) = {r.getMessage() for r in router_log.records if "REFUSED" in r.getMessage()}
    assert refusal.startswith(f"prefill replica {prefill.address} ")
    assert "kv_connector is 'memory', the cluster's is ''" in refusal


async def test_prompts_on_a_dropped_prefill_replica_are_cancelled():
    prefill, decode = FakePrefill(SCRIPT, hold=True), FakeDecode(SCRIPT)
    stranger = FakeDecode(SCRIPT, namespace=b"another")
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=3)))
        await prefill.changes.until(lambda: prefill.requests)
        await decode.stop()
        await stranger.start(decode.port)
        await prefill.changes.until(lambda: prefill.num_cancelled)
        assert router.candidate_ids() <= {stranger.info.worker_id}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stranger.stop()


async def test_another_model_is_accepted_once_every_replica_is_lost():
    old = FakeDecode(SCRIPT)
    async with running_workers(old), running_router(old) as router:
        await old.stop()
        await router.until(lambda: not router.fleet.decode.connected)
        new = FakeDecode(SCRIPT, namespace=b"new", block_size=8)
        await new.start(old.port)
        await router.until_connected(new)
        await router.generate(request(max_tokens=2))
        await new.stop()
    assert new.starts[0].namespace == b"new"


async def test_a_restarted_replica_has_no_cached_prefixes():
    prefill, old = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, old), running_router(prefill, old) as router:
        await router.generate(request(max_tokens=2))
        await router.generate(request(max_tokens=2))
        assert len(prefill.requests) == 1  # the second was cached on decode
        await old.stop()
        new = await FakeDecode(SCRIPT).start(old.port)
        await router.until_connected(new)
        await router.generate(request(max_tokens=2))
        await new.stop()
    assert len(prefill.requests) == 2


async def test_requests_follow_their_prefix_and_spread_otherwise():
    decodes = [FakeDecode(SCRIPT) for _ in range(3)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        await router.generate(request(max_tokens=2))
        home = await first_of(decodes, lambda decode: decode.starts)
        for _ in range(4):
            await router.generate(request((*PROMPT_IDS, 9), max_tokens=2))
        assert len(home.starts) == 5
        # Concurrent requests are spread over all replicas.
        for decode in decodes:
            decode.pause_after = 1
        tasks = [
            asyncio.create_task(router.generate(request([i] * 40, max_tokens=2)))
            for i in range(2, 11)
        ]
        for decode in decodes:
            await decode.changes.until(lambda d=decode: len(d.running) == 3)
        for decode in decodes:
            decode.resume()
        for responses in await asyncio.gather(*tasks):
            assert token_ids_of(responses) == SCRIPT[:2]


async def test_scaled_replicas_are_found_through_dns(monkeypatch):
    first = FakeDecode(SCRIPT)
    resolver = FakeResolver(monkeypatch)
    async with running_workers(first):
        resolver.hosts = ["127.0.0.1"]
        target = f"dns:///decode.test:{first.port}"
        async with running_router(first, decode=(target,), dns_interval_s=0.02) as router:
            resolver.hosts = ["127.0.0.1", "127.0.0.2"]
            second = FakeDecode(SCRIPT, host="127.0.0.2")
            await second.start(first.port)
            await router.until_connected(second)
            # A name that stops resolving removes no replica.
            resolver.hosts = None
            await resolver.resolved_again()
            assert len(router.candidate_ids()) == 2
            # A replica that DNS no longer lists is dropped once its connection is lost, not before.
            resolver.hosts = ["127.0.0.2"]
            await resolver.resolved_again()
            assert len(router.candidate_ids()) == 2
            await first.stop()
            await router.until(lambda: router.candidate_ids() == {second.info.worker_id})
            await router.generate(request(max_tokens=2))
            await second.stop()
    assert len(second.starts) == 1


class FakeResolver:
    """Resolves `decode.test` to `hosts`; fails if `hosts` is None."""

    def __init__(self, monkeypatch) -> None:
        self.hosts: list[str] | None = []
        self._changes = Changes()
        self._num_lookups = 0
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    def _resolve(self, host, port, *, type):  # noqa: A002 - getaddrinfo's name
        assert host == "decode.test"
        self._loop.call_soon_threadsafe(self._count)
        if self.hosts is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, type, 0, "", (host, port)) for host in self.hosts]

    def _count(self) -> None:
        self._num_lookups += 1
        self._changes.notify()

    async def resolved_again(self) -> None:
        """Waits for the lookup after the next one, by which the present `hosts` have been used."""
        wanted = self._num_lookups + 2
        await self._changes.until(lambda: self._num_lookups >= wanted)


async def test_health_follows_the_decode_tier():
    decode, prefill = FakeDecode(SCRIPT), FakePrefill(SCRIPT)
    async with running_workers(decode, prefill), running_router(decode, prefill) as router:
        stub = health_pb2_grpc.HealthStub(router.channel)
        name = "baton.v1.GenerationService"
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await prefill.stop()  # without prefill, decode computes prompts
        await decode.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        successor = await FakeDecode(SCRIPT).start(decode.port)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        await successor.stop()


@asynccontextmanager
async def running_fleet(decode, index):
    """Yields a fleet with one decode replica."""
    config = ServedModelConfig(model=decode.info.model, decode=(decode.address,))
    fleet = Fleet(config, index, 5, ClusterSecurity())
    fleet.start()
    try:
        await until_candidate(fleet, decode)
        yield fleet
    finally:
        await fleet.close()


async def until_candidate(fleet, decode) -> None:
    async with asyncio.timeout(20):
        while [r.replica_id for r in fleet.decode.candidates] != [decode.info.worker_id]:
            await fleet.wait_for_change()


async def test_a_replica_with_another_tokenizer_is_refused(router_log):
    decode = FakeDecode(SCRIPT, tokenizer_digest="aaaa")
    async with running_workers(decode):
        config = ServedModelConfig(model=decode.info.model, decode=(decode.address,))
        fleet = Fleet(config, CacheIndex(), 5, ClusterSecurity(), tokenizer_digest="bbbb")
        fleet.start()
        try:
            await router_log.until("REFUSED")
            (problem,) = fleet.decode.problems.values()
            assert "aaaa, this router's is bbbb" in problem
            assert not fleet.decode.connected
        finally:
            await fleet.close()


async def test_prefixes_of_a_lost_worker_are_removed():
    old, index = FakeDecode(SCRIPT), CacheIndex()
    async with running_workers(old):
        async with running_fleet(old, index) as fleet:
            index.expect(old.info.worker_id, [b"key"])
            assert len(index) == 1
            await old.stop()
            new = await FakeDecode(SCRIPT).start(old.port)
            await until_candidate(fleet, new)
            assert len(index) == 0
            index.expect(new.info.worker_id, [b"key"])
        assert len(index) == 0
        await new.stop()


async def test_no_prefixes_are_recorded_for_a_worker_lost_before_its_request_started():
    """Decode may die while prefill computes; its prefixes have been removed by then."""
    old, index = FakeDecode(SCRIPT), CacheIndex()
    async with running_workers(old), running_fleet(old, index) as fleet:
        (replica,) = fleet.decode.candidates
        await old.stop()
        new = await FakeDecode(SCRIPT).start(old.port)
        await until_candidate(fleet, new)
        routed = await routed_request(fleet)
        progress = Progress(routed.spec.params)
        placement = Placement(fleet, index, make_policy("prefix", PolicySettings()), None)
        pulls = PrefixPulls(fleet, index)
        stage = DecodeStage(fleet, placement, pulls, queue_timeout_s=0, resume_timeout_s=0)
        outputs = stage.run(routed, replica, progress, HeldHandoff())
        assert [list(output.token_ids) async for output in outputs] == [[i] for i in SCRIPT[:3]]
        assert len(routed.block_keys) == 10
        num_tokens = routed.num_prompt_tokens
        match = index.match(routed.block_keys, num_tokens)
        assert match.blocks(new.info.worker_id) == min(10, (num_tokens - 1) // routed.block_size)
        assert len(index) == 10
        await new.stop()


@pytest.mark.parametrize("has_prefill", [False, True])
async def test_a_prompt_is_looked_up_once_for_each_worker_that_it_is_sent_to(
    has_prefill, monkeypatch
):
    """Long prompts take 0.05 ms, and there may be hundreds of replicas."""
    prefills = [FakePrefill(SCRIPT)] * has_prefill
    workers, lookups = [FakeDecode(SCRIPT) for _ in range(3)], []
    look_up = CacheIndex._look_up
    monkeypatch.setattr(CacheIndex, "_look_up", lambda *args: lookups.append(1) or look_up(*args))
    monkeypatch.setattr("router.routing.cache_index._MAX_MATCH_AGE_S", 60)
    async with running_workers(*prefills, *workers), running_router(*prefills, *workers) as router:
        assert token_ids_of(await router.generate(request(max_tokens=2))) == SCRIPT[:2]
        assert len(prefills) == sum(len(prefill.requests) for prefill in prefills)
        assert len(lookups) == 1 + has_prefill


async def routed_request(fleet):
    read = await request_from_proto(request(request_id="r"))
    params = SamplingParams(temperature=0, max_tokens=3)
    deadline = time.monotonic() + 20
    (prompt,) = read.prompts
    record = RequestRecord(request_id="r")
    model, limits = fleet.require_model()
    maker = SpecMaker(tokenizer(), limits, model.eos_token_ids)
    return await prepare_request(read, prompt, params, maker, model, deadline, record)
