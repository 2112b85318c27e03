"""A conversation that a header names goes where its last turn was, if that costs as much."""

from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

from router.config.http import HttpConfig
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_http import RunningHttp
from tests.support.running_router import RunningRouter, request, running_router

SCRIPT = [50, 51, 52, 53]


@asynccontextmanager
async def router_with_two_prefills():
    """A router whose policy prefers the first of two prefill replicas, as all else is equal."""
    prefills = sorted((FakePrefill(SCRIPT) for _ in range(2)), key=lambda w: w.info.worker_id)
    workers = (*prefills, FakeDecode(SCRIPT))
    options = {"max_local_prefill_tokens": 0, "http": HttpConfig()}
    async with running_workers(*workers), running_router(*workers, **options) as router:
        yield router, *prefills


@asynccontextmanager
async def busy(router: RunningRouter, worker: FakePrefill):
    """Makes other replicas of its tier cost less."""
    with ExitStack() as reserved:
        for replica in router.fleet.prefill.candidates:
            if replica.replica_id == worker.info.worker_id:
                reserved.enter_context(replica.reserve(num_tokens=10**6, is_sent=False))
        yield


async def generate(router: RunningRouter, first_token: int, *metadata: tuple[str, str]) -> None:
    prompt = request(range(first_token, first_token + 40), max_tokens=2)
    async for _ in router.stub.GenerateStream(prompt, metadata=metadata, timeout=30):
        pass


async def test_a_session_of_grpc_stays_at_its_home_while_that_costs_as_much():
    async with router_with_two_prefills() as (router, first, second):
        async with busy(router, first):
            await generate(router, 100, ("x-session-id", "a"))
        assert len(second.requests) == 1
        await generate(router, 200, ("x-session-id", "a"))
        await generate(router, 300, ("x-session-id", "b"))
        await generate(router, 400)
        assert (len(first.requests), len(second.requests)) == (2, 2)
        async with busy(router, second):
            await generate(router, 500, ("x-session-id", "a"))
        await generate(router, 600, ("x-session-id", "a"))
        assert (len(first.requests), len(second.requests)) == (4, 2), "its home has moved"


@pytest.mark.parametrize("name", ["X-Session-Id", "X-Session-Token", "X-Claude-Code-Session-Id"])
async def test_a_session_of_http_stays_at_its_home(name: str):
    async with router_with_two_prefills() as (router, first, second), AsyncExitStack() as ends:
        running = RunningHttp(router)
        ends.push_async_callback(running.close)

        async def complete(first_token: int, **headers: str) -> None:
            prompt = list(range(first_token, first_token + 40))
            await running.openai.completions.create(
                model="scripted", prompt=prompt, max_tokens=2, extra_headers=headers
            )

        async with busy(router, first):
            await complete(100, **{name: "a"})
        await complete(200, **{name: "a"})
        assert (len(first.requests), len(second.requests)) == (0, 2)
        await complete(300, **{name: "b"})
        assert len(first.requests) == 1
