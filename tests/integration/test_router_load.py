"""Thousands of requests in a router: the event loop stays free, and deadlines are kept."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import DeadlineExceededError
from router.models import Model
from router.tenants.config import TenantsConfig
from router.tenants.tenants import Tenants
from rpc.logs import CURRENT_CALL, CallInfo
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.loop_watch import LoopWatch, watched_loops
from tests.support.running_http import running_http
from tests.support.running_router import request, running_router

SCRIPT = [50 + i % 200 for i in range(100)]
UNREACHABLE = ("127.0.0.1:1",)

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@pytest.fixture(autouse=True)
def caller() -> None:
    """The client of calls that these tests make without a server."""
    CURRENT_CALL.set(CallInfo(caller=Tenants(TenantsConfig()).find(())))


@asynccontextmanager
async def free_loop() -> AsyncIterator[LoopWatch]:
    """Asserts that no callback blocks the event loop meanwhile.

    The collector of cycles is off: its pauses grow with all objects of the process, those of
    other tests included, and it starts in any callback.
    """
    gc.disable()
    try:
        with watched_loops() as watch:
            yield watch
    finally:
        gc.enable()
    watch.assert_never_blocked()


async def lateness_of(model: Model, number: int, timeout_s: float) -> float:
    """Runs a request that cannot end; returns by how much it ended after its deadline."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        async with model.responses(request(request_id=f"late-{number}"), timeout_s) as responses:
            async for _ in responses:
                pass
    return time.monotonic() - started - timeout_s


async def first_token_of(model: Model, number: int) -> int:
    """Runs a request; returns its number once it has a token."""
    async with model.responses(request(request_id=f"served-{number}", max_tokens=1)) as responses:
        async for _ in responses:
            pass
    return number


async def arrivals(count: int) -> AsyncIterator[int]:
    """Yields numbers, with a round of the event loop between them, as between calls of clients."""
    for number in range(count):
        yield number
        await asyncio.sleep(0)


async def test_thousands_wait_for_a_full_replica_and_keep_their_deadlines():
    num_late, num_served = 3900, 100
    decode = FakeDecode(SCRIPT, pause_after=0, max_num_requests=1)
    async with running_workers(decode), running_router(decode) as router, free_loop():
        model, waiting = router.model, router.fleet.waiting
        running = asyncio.create_task(first_token_of(model, num_served))
        await decode.changes.until(lambda: decode.running)
        late = [
            asyncio.create_task(lateness_of(model, number, 12.0))
            async for number in arrivals(num_late)
        ]
        served = [
            asyncio.create_task(first_token_of(model, number))
            async for number in arrivals(num_served)
        ]
        while len(waiting) < num_late + num_served:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
        worst = sorted(await asyncio.gather(*late))[-1]
        assert worst < 0.2 + 0.5, "half a second for a machine that is busy with other work"
        assert len(waiting) == num_served
        decode.resume()
        assert sorted(await asyncio.gather(running, *served)) == list(range(num_served + 1))
        assert len(waiting) == 0
        assert router.service._admission.num_running == 0


async def test_the_router_answers_while_many_requests_wait_for_lost_replicas():
    number = 1500
    async with running_http(decode=UNREACHABLE) as api, free_loop():
        model = api.router.model
        tasks = [asyncio.create_task(lateness_of(model, i, 4.0)) async for i in arrivals(number)]
        slowest = 0.0
        while not all(task.done() for task in tasks):
            started = time.monotonic()
            response = await api.http.get("/health")
            slowest = max(slowest, time.monotonic() - started)
            assert response.status_code == 200
            await asyncio.sleep(0.05)
        assert slowest < 1.0
        assert sorted(await asyncio.gather(*tasks))[-1] < 0.2 + 0.5
