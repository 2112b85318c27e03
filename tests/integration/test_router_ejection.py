"""Failing replicas: ejection by breakers."""

import asyncio
import time

import pytest

from baton.common.errors import InternalError, UnavailableError
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_router import request, running_router, token_ids_of

SCRIPT = [50 + i % 200 for i in range(100)]


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
        assert bad.candidate().weight == 0.1
        clock.now += 10
        assert bad.candidate().weight == 1


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
