"""Requests of a decode replica that drains move to another one, with their KV."""

import asyncio

import pytest

from baton.v1 import prefill_pb2, worker_pb2
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import NAMESPACE, FakeDecode, first_of, running_workers
from tests.support.running_router import PROMPT_IDS, request, running_router, token_ids_of

SCRIPT = [50 + i % 200 for i in range(100)]


def handoff():
    return prefill_pb2.KvHandoff(
        format_version=1,
        handoff_id="moved",
        namespace=NAMESPACE,
        num_tokens=len(PROMPT_IDS),
        connector="memory",
    )


@pytest.mark.parametrize("changed", [{"draining": True}, {"role": worker_pb2.WORKER_ROLE_PREFILL}])
@pytest.mark.parametrize("has_handoff", [True, False])
async def test_a_stream_moves_off_a_replica_that_leaves_the_tier(changed, has_handoff):
    decodes = [FakeDecode(SCRIPT, pause_after=3) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        draining = await first_of(decodes, lambda decode: decode.num_sent == 3)
        (other,) = (decode for decode in decodes if decode is not draining)
        other.resume()
        draining.moved_handoff = handoff() if has_handoff else None
        draining.current_load.MergeFrom(worker_pb2.WorkerLoad(**changed))
        assert token_ids_of(await task) == SCRIPT[:6]
        (start,) = other.starts
        assert given_tokens(start) == {0: SCRIPT[:3]}
        assert start.HasField("handoff") == has_handoff
        if has_handoff:
            assert start.handoff == handoff()
            await draining.changes.until(lambda: draining.released == ["moved"])
        assert len(draining.moves) == 1


async def test_a_stream_stays_on_a_replica_that_drains_until_another_is_there():
    draining, other = FakeDecode(SCRIPT, pause_after=3), FakeDecode(SCRIPT)
    async with running_workers(draining):
        targets = (draining.address, other.address)
        async with running_router(decode=targets) as router:
            await router.until_connected(draining)
            task = asyncio.create_task(router.generate(request(max_tokens=8)))
            await draining.changes.until(lambda: draining.num_sent == 3)
            draining.current_load.draining = True
            await router.until(lambda: not router.candidate_ids())
            draining.resume(pause_after=5)
            await draining.changes.until(lambda: draining.num_sent == 5)
            assert draining.moves == []
            await other.start()
            assert token_ids_of(await task) == SCRIPT[:8]
            assert given_tokens(other.starts[0]) == {0: SCRIPT[:5]}
            await other.stop()


async def test_any_number_of_drains_ends_no_stream():
    decodes = [FakeDecode(SCRIPT, pause_after=0) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=20)))
        running = await first_of(decodes, lambda decode: decode.running)
        for count in range(1, 13):
            running = await moved_on(router, decodes, running, count)
        running.resume()
        assert token_ids_of(await task) == SCRIPT[:20]
        assert sum(len(decode.moves) for decode in decodes) == 12


async def moved_on(router, decodes, running, count):
    """Drains the running replica after that many tokens; returns the one that continues."""
    running.num_sent = 0
    running.resume(pause_after=count)
    await running.changes.until(lambda: running.num_sent)
    (other,) = (decode for decode in decodes if decode is not running)
    other.pause_after, other.current_load.draining = count, False
    await router.until_connected(other)
    running.current_load.draining = True
    await other.changes.until(lambda: other.running)
    return other


async def test_candidates_that_are_compared_stay_where_they_are():
    decodes = [FakeDecode(SCRIPT, pause_after=3) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        message = request(max_tokens=6)
        message.sampling.temperature = 1.0
        message.sampling.best_of = 2
        task = asyncio.create_task(router.generate(message))
        draining = await first_of(decodes, lambda decode: decode.running)
        draining.current_load.draining = True
        await router.until(lambda: len(router.candidate_ids()) == 1)
        draining.resume()
        assert token_ids_of(await task) == SCRIPT[:6]
        assert draining.moves == []
