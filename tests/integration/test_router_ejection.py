"""Slow and failing replicas: hedged prompts, and ejection by breakers."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from baton.common.errors import InternalError, UnavailableError
from baton.v1 import worker_pb2
from router.stages.held_handoff import HeldHandoff
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import Changes, FakeDecode, FakePrefill, first_of, running_workers
from tests.support.running_router import request, running_router, token_ids_of

SCRIPT = [50 + i % 200 for i in range(100)]
KEYS = [bytes([i]) * 32 for i in range(10)]
HEDGED = {"hedge_prefill_after_s": 0.02}


class Hedge:
    """A prompt that is on two prefill replicas, neither of which has answered."""

    def __init__(self, router, call, slow, hedge, decode):
        self.router, self.call, self.decode = router, call, decode
        self.slow, self.hedge = slow, hedge

    async def finish(self, *, has_first_token=True):
        """Checks the answer; returns the only start of decode."""
        responses = [response async for response in self.call]
        assert token_ids_of(responses) == SCRIPT[:6]
        (start,) = self.decode.starts
        assert given_tokens(start) == ({0: SCRIPT[:1]} if has_first_token else {})
        return start

    def outcomes(self):
        values = self.router.service._metrics.snapshot().values
        return {
            series[-1]: count
            for series, count in values.items()
            if series[0] == "baton_router_hedges" and count
        }


@asynccontextmanager
async def hedged_prompt(**options):
    prefills = [FakePrefill(SCRIPT, hold=True, saves=[KEYS[:2], KEYS[2:3]]) for _ in range(2)]
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with (
        running_workers(*workers),
        running_router(*workers, **HEDGED, **options) as router,
    ):
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=30)
        for prefill in prefills:
            await prefill.changes.until(lambda prefill=prefill: prefill.requests)
        # The id of the second call is longer: it has the number of the attempt.
        slow, hedge = sorted(prefills, key=lambda prefill: len(prefill.requests[0].request_id))
        yield Hedge(router, call, slow, hedge, decode)


def keys_sent_to(decode, handoff_id):
    return [
        key
        for command in decode.prefetches
        for key in command.blocks.block_keys
        if command.blocks.handoff_id == handoff_id
    ]


async def test_a_hedge_that_answers_first_replaces_the_slow_replica():
    async with hedged_prompt() as scene:
        await scene.decode.changes.until(lambda: scene.decode.prefetches)
        scene.hedge.answer()
        start = await scene.finish()
        await scene.slow.changes.until(lambda: scene.slow.num_cancelled and scene.slow.released)
        await scene.hedge.changes.until(lambda: scene.hedge.released)
        assert scene.hedge.num_cancelled == 0
        (first,), (second,) = scene.slow.requests, scene.hedge.requests
        assert second.request_id == f"{first.request_id}/1"
        handoff_id = handoff_of(scene.hedge)
        assert start.handoff.handoff_id == handoff_id
        assert scene.slow.released == [handoff_of(scene.slow)]
        assert scene.hedge.released == [handoff_id]
        assert keys_sent_to(scene.decode, handoff_id) == KEYS[:3]
        assert scene.outcomes() == {"won": 1}


@pytest.fixture
def held(monkeypatch):
    """Returns the ids of the handoffs that a router knows of, and what changes with them."""
    ids, changes = set(), Changes()
    hold = HeldHandoff.hold

    def noted_hold(handoff, message, holder):
        hold(handoff, message, holder)
        ids.add(message.handoff_id)
        changes.notify()

    monkeypatch.setattr(HeldHandoff, "hold", noted_hold)
    return ids, changes


async def until_held(held, *prefills):
    ids, changes = held
    wanted = {handoff_of(prefill) for prefill in prefills}
    await changes.until(lambda: wanted <= ids)


def handoff_of(prefill):
    (spec,) = prefill.requests
    return f"handoff-{spec.request_id}"


async def test_a_hedge_that_loses_is_cancelled_and_its_blocks_are_not_loaded(held):
    async with hedged_prompt() as scene:
        await until_held(held, scene.hedge)
        slow_id = handoff_of(scene.slow)
        await scene.decode.changes.until(lambda: keys_sent_to(scene.decode, slow_id) == KEYS[:3])
        scene.slow.answer()
        start = await scene.finish()
        await scene.hedge.changes.until(lambda: scene.hedge.num_cancelled and scene.hedge.released)
        assert start.handoff.handoff_id == slow_id
        assert {command.blocks.handoff_id for command in scene.decode.prefetches} == {slow_id}
        assert scene.outcomes() == {"lost": 1}
        for replica in scene.router.fleet.prefill.candidates:
            state = replica.state(0)
            assert state.num_requests == state.num_queued_tokens == 0
    assert len(scene.slow.requests) == len(scene.hedge.requests) == 1


async def test_the_hedge_answers_if_the_slow_replica_dies():
    async with hedged_prompt() as scene:
        await scene.slow.stop()
        await scene.router.until(lambda: len(scene.router.fleet.prefill.candidates) == 1)
        scene.hedge.answer()
        start = await scene.finish()
    assert start.HasField("handoff")
    assert len(scene.hedge.requests) == 1


async def test_the_slow_replica_answers_if_the_hedge_dies():
    async with hedged_prompt() as scene:
        await scene.hedge.stop()
        await scene.router.until(lambda: len(scene.router.fleet.prefill.candidates) == 1)
        scene.slow.answer()
        await scene.finish()
        assert scene.outcomes() == {"lost": 1}
    assert len(scene.slow.requests) == 1


async def test_decode_computes_the_prompt_if_both_replicas_die():
    async with hedged_prompt() as scene:
        await scene.hedge.stop()
        await scene.slow.stop()
        start = await scene.finish(has_first_token=False)
    assert not start.HasField("handoff")


async def test_a_client_that_leaves_frees_both_replicas(held):
    async with hedged_prompt() as scene:
        await until_held(held, scene.slow, scene.hedge)
        scene.call.cancel()
        for prefill in (scene.slow, scene.hedge):
            await prefill.changes.until(lambda p=prefill: p.num_cancelled and p.released)
        for replica in scene.router.fleet.prefill.candidates:
            assert replica.state(0).num_requests == 0
    assert not scene.decode.starts


async def test_a_hedge_is_no_attempt_of_the_three():
    """The first replica and its hedge fail; the two next ones are not hedged."""
    prefills = [FakePrefill(SCRIPT, hold=True) for _ in range(4)]
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with running_workers(*workers), running_router(*workers, **HEDGED) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        left = list(prefills)
        asked = hedges_asked_for(router)
        for _ in range(2):
            busy = await first_of(left, lambda prefill: prefill.requests)
            left.remove(busy)
        for prefill in set(prefills) - set(left):
            await prefill.stop()
        busy = await first_of(left, lambda prefill: prefill.requests)
        left.remove(busy)
        await asked.until(lambda: asked.count == 3)
        assert not left[0].requests  # one hedge is the most
        await busy.stop()
        left[0].answer()
        assert token_ids_of(await task) == SCRIPT[:6]
    assert len(left[0].requests) == 1


@pytest.mark.parametrize(
    ("load", "decode_id"),
    [
        ({"num_free_blocks": 0}, "d"),
        ({"num_queued_tokens": 10_000}, "d"),
        ({"num_running": 1}, "d"),
        ({}, "b"),
    ],
    ids=["pool full", "longer queue", "queue full", "decodes the request"],
)
async def test_a_prompt_is_not_hedged_where_the_other_replica_is_not_free(load, decode_id):
    slow = FakePrefill(SCRIPT, hold=True, worker_id="a")  # the first choice among equals
    other = FakePrefill(SCRIPT, max_num_requests=1, worker_id="b")
    decode = FakeDecode(SCRIPT, worker_id=decode_id)
    other.current_load.MergeFrom(worker_pb2.WorkerLoad(**load))
    if not load.get("num_free_blocks", 1):
        other.current_load.num_free_blocks = 0
    workers = (slow, other, decode)
    async with running_workers(*workers), running_router(*workers, **HEDGED) as router:
        asked = hedges_asked_for(router)
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await slow.changes.until(lambda: slow.requests)
        await asked.until(lambda: asked.count)
        slow.answer()
        assert token_ids_of(await task) == SCRIPT[:6]
    assert not other.requests


def hedges_asked_for(router):
    """Returns changes with the number of times that a prompt could have been hedged."""
    stage = router.model._pipeline._prefill
    changes, hedge = Changes(), stage._hedge
    changes.count = 0

    def noted_hedge(prompt, slow):
        call = hedge(prompt, slow)
        changes.count += 1
        changes.notify()
        return call

    stage._hedge = noted_hedge
    return changes


async def test_a_replica_whose_prompts_fail_is_ejected_until_a_probe_succeeds():
    failing, good = FakePrefill(SCRIPT), FakePrefill(SCRIPT)
    decode = FakeDecode(SCRIPT)
    workers = (failing, good, decode)
    failing.refusal = UnavailableError("its engine has stopped")
    good.current_load.num_queued_tokens = 5_000  # the failing one is preferred
    async with running_workers(*workers), running_router(*workers) as router:
        replicas = {r.replica_id: r for r in router.fleet.prefill.candidates}
        bad, other = replicas[failing.info.worker_id], replicas[good.info.worker_id]
        clock = FakeClock(bad)
        await router_reports(other, lambda load: load.num_queued_tokens)
        for number in range(2, 7):
            responses = await router.generate(request([number] * 40, max_tokens=4))
            assert token_ids_of(responses) == SCRIPT[:4]
        assert (len(failing.requests), len(good.requests)) == (3, 5)
        assert bad.is_ejected
        failing.refusal = None
        clock.now += 2
        await router.generate(request([9] * 40, max_tokens=4))
        assert len(failing.requests) == 4
        assert not bad.is_ejected
        assert bad.state(0).weight == 0.1
        clock.now += 10
        assert bad.state(0).weight == 1


async def test_requests_go_to_ejected_decode_replicas_if_there_are_no_others():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode, queue_timeout_s=0.1) as router:
        (replica,) = router.fleet.decode.candidates
        FakeClock(replica)  # no cool-down ends
        decode.refusal = InternalError("fails")
        for _ in range(3):
            with pytest.raises(Exception, match="fails"):
                await router.generate(request(max_tokens=4))
        assert replica.is_ejected
        decode.refusal = None
        assert token_ids_of(await router.generate(request(max_tokens=4))) == SCRIPT[:4]
        assert not replica.is_ejected


class FakeClock:
    """Replaces the clock of a replica's breaker."""

    def __init__(self, replica):
        self.now = replica._breaker._clock() + 60
        replica._breaker._clock = lambda: self.now


async def router_reports(replica, condition):
    """Waits until the replica has reported such a load, of which no event says anything."""
    deadline = time.monotonic() + 20
    while not condition(replica.load):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
