"""Requests that wait in the router instead of being refused."""

import asyncio
import time

import grpc

from baton.common.errors import ResourceExhaustedError, UnavailableError
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    failed_call,
    request,
    running_router,
    token_ids_of,
)

SCRIPT = [50 + i % 200 for i in range(100)]


def retry_after_ms(error):
    return dict(error.trailing_metadata())["retry-after-ms"]


async def waiting(router, count=1):
    """Waits until that many requests are in the queue, of which no event says anything."""
    deadline = time.monotonic() + 20
    while len(router.fleet.waiting) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_request_waits_for_the_first_replica_of_a_cluster():
    decode = FakeDecode(SCRIPT)
    async with running_router(decode=(decode.address,), prefill=()) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await waiting(router)
        await decode.start()
        messages = await task
        await decode.stop()
    assert token_ids_of(messages) == SCRIPT[:6]
    timings = messages[-1].timings
    assert 0 < timings.wait_ms <= timings.route_ms <= timings.total_ms


async def test_a_refusal_says_what_the_request_waited_for_and_when_to_try_again():
    async with running_router(decode=("127.0.0.1:1",), queue_timeout_s=0.1) as router:
        error = await failed_call(router.generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode replica is ready" in error.details()
    assert "--queue-timeout-s" in error.details()
    assert retry_after_ms(error) == "5000"


async def test_the_deadline_ends_the_wait():
    async with running_router(decode=("127.0.0.1:1",)) as router:
        error = await failed_call(router.generate(request(), timeout_s=0.3))
        await waiting(router, 0)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_requests_beyond_the_room_of_a_replica_wait_in_the_order_of_their_priorities():
    decode = FakeDecode(SCRIPT, pause_after=3, max_num_requests=1)
    async with running_workers(decode), running_router(decode) as router:
        names = {"running": 0, "last": 5, "first": -5, "second": 0}
        tasks = {}
        for number, (name, priority) in enumerate(names.items()):
            message = request(request_id=name, max_tokens=5)
            message.priority = priority
            tasks[name] = asyncio.create_task(router.generate(message))
            if number == 0:
                await decode.changes.until(lambda: decode.num_sent == 3)
            await waiting(router, number)
        decode.resume()
        for task in tasks.values():
            assert token_ids_of(await task) == SCRIPT[:5]
    ids = [start.spec.request_id.rsplit("-", 1)[0] for start in decode.starts]
    assert [next(n for n in names if i.startswith(n)) for i in ids] == [
        *("running", "first", "second", "last")
    ]


async def test_no_prompt_is_computed_before_decode_will_soon_have_room_for_it():
    """Of a replica with one seat, and of one whose blocks are taken."""
    for decode in (
        FakeDecode(SCRIPT, pause_after=3, max_num_seqs=1),
        FakeDecode(SCRIPT, pause_after=3),
    ):
        if decode.info.max_num_seqs > 1:
            decode.current_load.num_free_blocks = 0
        prefill = FakePrefill(SCRIPT)
        async with (
            running_workers(prefill, decode),
            running_router(prefill, decode, queue_timeout_s=0.05) as router,
        ):
            prompts = [(number, *PROMPT_IDS) for number in range(50, 55)]
            tasks = [
                asyncio.create_task(router.generate(request(prompt, max_tokens=6)))
                for prompt in prompts
            ]
            await decode.changes.until(lambda running=decode.running: len(running) == 2)
            await waiting(router, 3)
            await asyncio.sleep(0.1)  # beyond the time for which they would wait for a replica
            assert len(prefill.requests) == 2
            if decode.info.max_num_seqs > 1:
                decode.current_load.num_free_blocks = decode.info.num_blocks
                await decode.changes.until(lambda running=decode.running: len(running) == 5)
            decode.resume()
            for task in tasks:
                assert token_ids_of(await task) == SCRIPT[:6]
        assert len(prefill.requests) == 5


async def test_prompts_wait_in_the_router_while_prefill_has_enough_to_do():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    prefill.current_load.num_queued_tokens = 10_000
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        await router.until(lambda: router.fleet.prefill.candidates[0].load.num_queued_tokens)
        held = router.fleet.prefill.candidates[0].reserve()
        with held, router.fleet.prefill.candidates[0].reserve():
            task = asyncio.create_task(router.generate(request(max_tokens=6)))
            await waiting(router)
            short = await router.generate(request(range(100, 103), max_tokens=6))
            assert token_ids_of(short) == SCRIPT[:6]  # decode computes it
            assert not prefill.requests
        assert token_ids_of(await task) == SCRIPT[:6]
    assert len(prefill.requests) == 1


async def test_a_request_that_all_replicas_refuse_as_full_waits_for_their_next_reports():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        decode.refusal = ResourceExhaustedError("queue full")
        task = asyncio.create_task(router.generate(request(max_tokens=5)))
        await decode.changes.until(lambda: len(decode.starts) == 1)
        decode.refusal = None
        decode.current_load.num_waiting = 1
        assert token_ids_of(await task) == SCRIPT[:5]


async def test_full_replicas_end_in_resource_exhausted_after_the_wait():
    decode = FakeDecode(SCRIPT, max_num_requests=1)
    async with running_workers(decode), running_router(decode, queue_timeout_s=0.1) as router:
        decode.current_load.num_running = 1
        await router.until(lambda: not router.fleet.decode.candidates[0].has_room)
        error = await failed_call(router.generate(request()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "all decode replicas are full" in error.details()
    assert retry_after_ms(error) == "5000"


async def test_a_request_that_a_draining_replica_refuses_waits_for_another():
    draining, other = FakeDecode(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(draining):
        targets = (draining.address, other.address)
        async with running_router(decode=targets) as router:
            await router.until_connected(draining)
            draining.refusal = UnavailableError("drains")
            task = asyncio.create_task(router.generate(request(max_tokens=5)))
            await waiting(router)
            await other.start()
            assert token_ids_of(await task) == SCRIPT[:5]
            await other.stop()


async def test_streams_that_lost_their_replica_go_before_new_requests():
    old, new = FakeDecode(SCRIPT, pause_after=3), FakeDecode(SCRIPT, max_num_requests=1)
    async with running_workers(old):
        targets = (old.address, new.address)
        async with running_router(decode=targets) as router:
            await router.until_connected(old)
            begun = asyncio.create_task(router.generate(request(request_id="begun", max_tokens=6)))
            await old.changes.until(lambda: old.num_sent == 3)
            old.current_load.draining = True
            await router.until(lambda: not router.candidate_ids())
            fresh = asyncio.create_task(router.generate(request(request_id="new", max_tokens=6)))
            await waiting(router)
            await old.stop()
            await waiting(router, 2)
            await new.start()
            assert token_ids_of(await begun) == SCRIPT[:6]
            assert token_ids_of(await fresh) == SCRIPT[:6]
            await new.stop()
    assert [start.spec.request_id[:3] for start in new.starts] == ["beg", "new"]


async def test_without_prefill_a_prompt_waits_fails_or_is_computed_by_decode():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    targets = {"prefill": (prefill.address,)}
    async with running_workers(decode):
        targets["decode"] = (decode.address,)
        async with running_router(**targets, no_prefill_policy="local") as router:
            await router.until_connected(decode)
            assert token_ids_of(await router.generate(request(max_tokens=5))) == SCRIPT[:5]
        async with running_router(**targets, no_prefill_policy="fail") as router:
            await router.until_connected(decode)
            error = await failed_call(router.generate(request(max_tokens=5)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "--no-prefill-policy fail" in error.details()
            assert retry_after_ms(error) == "5000"
        async with running_router(**targets, no_prefill_policy="wait") as router:
            await router.until_connected(decode)
            task = asyncio.create_task(router.generate(request(max_tokens=5)))
            await waiting(router)
            await prefill.start()
            assert token_ids_of(await task) == SCRIPT[:5]
            assert len(prefill.requests) == 1
            await prefill.stop()


async def test_a_failing_prefill_tier_is_named_when_decode_may_not_compute_the_prompt():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    prefill.refusal = UnavailableError("out of order")
    policy = {"no_prefill_policy": "wait", "queue_timeout_s": 0.1}
    async with running_workers(prefill, decode), running_router(prefill, decode, **policy) as r:
        error = await failed_call(r.generate(request(max_tokens=5)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "1 failed" in error.details()
    assert "--queue-timeout-s" in error.details()
    assert decode.starts == []


async def test_a_cluster_without_a_prefill_tier_needs_no_policy():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode, no_prefill_policy="fail") as router:
        assert token_ids_of(await router.generate(request(max_tokens=5))) == SCRIPT[:5]
