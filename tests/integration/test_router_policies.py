"""Routing policies over fake workers: bursts, remote prefills decided by costs, traces."""

import asyncio

import pytest

from baton.cli.trace import format_trace
from baton.v1 import cluster_pb2, worker_pb2
from router.cluster_servicer import ClusterServicer
from router.routing.policies import POLICIES
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_router import PROMPT_IDS, request, running_router, token_ids_of

SCRIPT = [11, 12, 13, 14, 1]


def report(worker, **fields):
    """Makes a worker report other numbers from now on."""
    load = worker_pb2.WorkerLoad()
    load.CopyFrom(worker.current_load)
    load.MergeFrom(worker_pb2.WorkerLoad(**fields))
    worker.current_load = load


async def trace_of(router, request_id):
    servicer = ClusterServicer(router.service.log, status=None, models=())
    message = cluster_pb2.GetTraceRequest(request_id=request_id)
    (trace,) = (await servicer.GetTrace(message, None)).traces
    return trace


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
async def test_a_burst_of_single_turns_uses_every_decode_replica(policy):
    prefill, decodes = FakePrefill(SCRIPT), [FakeDecode(SCRIPT, pause_after=1) for _ in range(5)]
    workers = prefill, *decodes
    async with running_workers(*workers), running_router(*workers, routing_policy=policy) as router:
        tasks = [
            asyncio.create_task(router.generate(request([i % 900 + 2] * 40, max_tokens=3)))
            for i in range(256)
        ]
        await until(lambda: sum(len(decode.running) for decode in decodes) == 256)
        assert min(len(decode.running) for decode in decodes) >= 48
        for decode in decodes:
            decode.resume()
        for responses in await asyncio.gather(*tasks):
            assert token_ids_of(responses) == SCRIPT[:3]
        for replica in router.fleet.decode.candidates:
            assert replica.candidate().num_requests == 0
    assert len(prefill.requests) == 256


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves(policy):
    workers = [FakePrefill(SCRIPT), FakePrefill(SCRIPT), FakeDecode(SCRIPT), FakeDecode(SCRIPT)]
    async with running_workers(*workers), running_router(*workers, routing_policy=policy) as router:
        for number in range(4):
            responses = await router.generate(
                request([number + 2] * 40, request_id=f"r{number}", max_tokens=3)
            )
            assert token_ids_of(responses) == SCRIPT[:3]
        trace = await trace_of(router, "r3")
    assert [(choice.tier, choice.policy) for choice in trace.choices] == [
        ("prefill", policy),
        ("decode", policy),
    ]
    if policy == "round-robin":
        assert [len(worker.requests) for worker in workers[:2]] == [2, 2]
        assert [len(worker.starts) for worker in workers[2:]] == [2, 2]


async def test_costs_decide_which_tier_computes_a_prompt():
    """Until both report how fast they are, all but very short remainders go to prefill."""
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT, kv_bytes_per_token=1000)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        (replica,), (remote,) = router.fleet.decode.candidates, router.fleet.prefill.candidates

        async def num_prefills(request_id, first_token):
            before = len(prefill.requests)
            message = request([first_token] * 40, request_id=request_id, max_tokens=2)
            assert token_ids_of(await router.generate(message)) == SCRIPT[:2]
            return len(prefill.requests) - before

        assert await num_prefills("unknown", 2) == 1
        speeds = {"prompt_token_s": 0.001, "decode_step_s": 0.01, "load_bytes_per_s": 1e9}
        report(decode, **speeds)
        report(prefill, **speeds)
        await until(lambda: replica.candidate().has_speeds and remote.candidate().has_speeds)
        assert await num_prefills("quick prefill", 3) == 1
        report(prefill, num_queued_tokens=900, queued_prompt_s=0.9)
        await until(lambda: remote.backlog_s == 0.9)
        assert await num_prefills("long queue", 4) == 0
        trace = await trace_of(router, "long queue")
        assert trace.local_prefill_s == pytest.approx(0.08)
        assert trace.remote_prefill_s == pytest.approx(0.944, abs=0.001)
        assert [choice.tier for choice in trace.choices] == ["decode"]
        text = "\n".join(format_trace(trace))
        assert "80.0 ms on decode, 944.0 ms on prefill" in text
        assert "decode: least cost (prefix, 1 replicas)\n  replica" in text


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - reports are no event
            await asyncio.sleep(0.01)


async def test_a_slow_replica_gets_fewer_requests():
    fast, slow = FakeDecode(SCRIPT, pause_after=1), FakeDecode(SCRIPT, pause_after=1)
    async with running_workers(fast, slow), running_router(fast, slow) as router:
        for worker, factor in ((fast, 1), (slow, 2)):
            report(worker, prompt_token_s=1e-6 * factor, decode_step_s=0.01 * factor)
        candidates = router.fleet.decode.candidates
        await until(lambda: all(replica.candidate().has_speeds for replica in candidates))
        tasks = [
            asyncio.create_task(router.generate(request([i + 2] * 40, max_tokens=3)))
            for i in range(60)
        ]
        await until(lambda: len(fast.running) + len(slow.running) == 60)
        assert 18 <= len(slow.running) <= 22
        fast.resume()
        slow.resume()
        await asyncio.gather(*tasks)


async def test_requests_of_other_routers_count():
    busy, idle = FakeDecode(SCRIPT, pause_after=1), FakeDecode(SCRIPT, pause_after=1)
    async with running_workers(busy, idle), running_router(busy, idle) as router:
        report(busy, num_running=20)
        await until(
            lambda: sum(r.candidate().num_requests for r in router.fleet.decode.candidates) == 20
        )
        tasks = [
            asyncio.create_task(router.generate(request((*PROMPT_IDS, i + 2), max_tokens=3)))
            for i in range(30)
        ]
        await until(lambda: len(busy.running) + len(idle.running) == 30)
        assert len(idle.running) >= 24
        idle.resume()
        busy.resume()
        await asyncio.gather(*tasks)
