"""Thousands of requests in a router: the event loop stays free, and deadlines are kept."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import grpc
import httpx2
import pytest

from baton.common.errors import DeadlineExceededError
from baton.v1 import generation_pb2
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from router.config.tenants import TenantsConfig
from router.generation_wire import request_from_proto
from router.models import Model
from router.tenants.tenants import Tenants
from rpc.logs import CallInfo, serving
from tests.support.fake_workers import MODEL, FakeDecode, running_workers
from tests.support.loop_watch import LoopWatch, watched_loops
from tests.support.running_http import running_http
from tests.support.running_router import RunningRouter, failed_call, request, running_router

SCRIPT = [50 + i % 200 for i in range(100)]
UNREACHABLE = ("127.0.0.1:1",)

MAX_DELAY_S = 5.0
"""Time for other work on the machine. A request that misses its deadline ends much later."""
QUEUE_TIMEOUT_S = 60.0
PATIENT = {"X-Request-Timeout-S": "500"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def caller() -> Iterator[None]:
    """The client of calls that these tests make without a server."""
    with serving(CallInfo(caller=Tenants(TenantsConfig()).find(()))):
        yield


@asynccontextmanager
async def free_loop() -> AsyncIterator[LoopWatch]:
    """Asserts that no callback blocks the event loop meanwhile."""
    with watched_loops() as watch:
        yield watch
    watch.assert_never_blocked()


async def run_to_end(
    model: Model, message: generation_pb2.GenerateRequest, timeout_s: float | None = None
) -> None:
    """Runs a request as both servers do."""
    async with model.outputs(await request_from_proto(message), timeout_s) as outputs:
        async for _ in outputs:
            pass


async def lateness_of(model: Model, number: int, timeout_s: float) -> float:
    """Runs a request that cannot end; returns by how much it ended after its deadline."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        await run_to_end(model, request(request_id=f"late-{number}"), timeout_s)
    return time.monotonic() - started - timeout_s


async def first_token_of(model: Model, number: int) -> int:
    """Runs a request; returns its number once it has a token."""
    await run_to_end(model, request(request_id=f"served-{number}", max_tokens=1))
    return number


async def arrivals(count: int) -> AsyncIterator[int]:
    """Yields numbers, with a round of the event loop between them, as between calls of clients."""
    for number in range(count):
        yield number
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_thousands_wait_for_a_full_replica_and_keep_their_deadlines():
    """They arrive before the first deadline: behind a request that has waited for as long, others
    are refused at once.
    """
    num_late, num_served = 3900, 100
    decode = FakeDecode(SCRIPT, pause_after=0, max_num_requests=1)
    config = {"queue_timeout_s": QUEUE_TIMEOUT_S}
    async with running_workers(decode), running_router(decode, **config) as router, free_loop():
        model, waiting = router.model, router.fleet.waiting
        running = asyncio.create_task(first_token_of(model, num_served))
        await decode.changes.until(lambda: decode.running)
        late = [
            asyncio.create_task(lateness_of(model, number, 25.0))
            async for number in arrivals(num_late)
        ]
        served = [
            asyncio.create_task(first_token_of(model, number))
            async for number in arrivals(num_served)
        ]
        while len(waiting) + sum(map(asyncio.Task.done, late)) < num_late + num_served:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
        assert max(await asyncio.gather(*late)) < MAX_DELAY_S
        assert len(waiting) == num_served
        decode.resume()
        assert sorted(await asyncio.gather(running, *served)) == list(range(num_served + 1))
        assert len(waiting) == 0
        assert router.service._admission.num_running == 0


@pytest.mark.slow
async def test_the_router_answers_while_many_requests_wait_for_lost_replicas():
    number = 1500
    config = {"decode": UNREACHABLE, "queue_timeout_s": QUEUE_TIMEOUT_S}
    async with running_http(**config) as api, free_loop():
        model = api.router.model
        tasks = [asyncio.create_task(lateness_of(model, i, 12.0)) async for i in arrivals(number)]
        slowest = 0.0
        while not all(task.done() for task in tasks):
            started = time.monotonic()
            response = await api.http.get("/health")
            slowest = max(slowest, time.monotonic() - started)
            assert response.status_code == 200
            await asyncio.sleep(0.05)
        assert slowest < MAX_DELAY_S
        assert max(await asyncio.gather(*tasks)) < MAX_DELAY_S


@contextmanager
def overloaded(router: RunningRouter) -> Iterator[None]:
    """Requests seem to take a minute, as ten others are before them."""
    backlog = router.model._backlog
    with ExitStack() as others:
        for _ in range(10):
            others.enter_context(backlog.place(0))
        with backlog.place(0) as place:
            place.entered_at -= 60
        yield


async def test_requests_that_would_end_too_late_are_refused_before_they_are_parsed():
    decode = FakeDecode(SCRIPT)
    # Later than an urgent request would end if it waited for a replica's seat.
    deadline = {"X-Request-Timeout-S": "90", "Content-Type": "application/json"}
    async with running_http(decode) as api:
        with overloaded(api.router):

            async def post(body: str, headers: dict[str, str] = deadline) -> httpx2.Response:
                return await api.http.post("/v1/completions", content=body, headers=headers)

            refused = await post('{"prompt": no JSON')
            with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
                await api.router.generate(request(max_tokens=5), timeout_s=30)
            urgent = await post('{"prompt": "a", "max_tokens": 5, "priority": -1}')
            patient = await post('{"prompt": "a", "max_tokens": 5}', {**deadline, **PATIENT})
        metrics = (await api.http.get("/metrics")).text
    assert refused.status_code == 503
    assert refused.headers["x-baton-reason"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 20
    assert "take about 60" in refused.json()["error"]["message"]
    assert [urgent.status_code, patient.status_code] == [200, 200]
    assert over_grpc.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(over_grpc.value.trailing_metadata())["retry-after-ms"]) >= 40_000
    assert len(decode.starts) == 2
    assert 'baton_router_refused_calls_total{reason="overload"} 2.0' in metrics


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_objectives_that_cannot_be_met_are_refused_with_their_reason(path):
    chat = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    body = {"prompt": "a", "max_tokens": 5} if path == "/v1/completions" else chat
    template = ChatTemplate(
        TemplateSource({"default": TemplateText("{{ messages[0].content }}", "test")}, {})
    )
    async with running_http(FakeDecode(SCRIPT), chat_template=template) as api:

        async def post(**slo: str) -> httpx2.Response:
            headers = {name.replace("_", "-"): value for name, value in slo.items()}
            return await api.http.post(path, json={"model": MODEL, **body}, headers=headers)

        with overloaded(api.router):
            late = await post(x_slo_ttft_ms="2000")
            patient = await post(x_slo_ttft_ms="500000", x_slo_tpot_ms="500000")
        bad = await post(x_slo_tpot_ms="fast")
        metrics = (await api.http.get("/metrics")).text
    assert late.status_code == 503
    assert late.headers["x-baton-reason"] == "slo-ttft"
    assert int(late.headers["retry-after"]) >= 58
    kind = "overloaded_error" if path == "/v1/messages" else "server_error"
    assert late.json()["error"]["type"] == kind
    assert patient.status_code == 200
    assert bad.status_code == 400
    assert bad.headers["x-baton-reason"] == "invalid-argument"
    assert "x-slo-tpot-ms is 'fast'" in bad.json()["error"]["message"]
    assert 'baton_router_refused_calls_total{reason="slo_ttft"} 1.0' in metrics


async def test_the_time_until_the_deadline_runs_from_the_arrival_of_the_headers():
    async with running_http(FakeDecode(SCRIPT, pause_after=0)) as api:

        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"prompt": "a", '
            await asyncio.sleep(0.3)
            yield b'"max_tokens": 5}'

        headers = {"X-Request-Timeout-S": "0.2", "Content-Type": "application/json"}
        late = await api.http.post("/v1/completions", content=slow_body(), headers=headers)
    assert late.status_code == 504
    assert "not read within 0.2 s" in late.json()["error"]["message"]


async def test_a_request_that_has_waited_for_too_long_is_not_started():
    decode = FakeDecode(SCRIPT, pause_after=0, max_num_requests=1)
    async with running_workers(decode), running_router(decode) as router:
        first = asyncio.create_task(router.generate(request(max_tokens=5)))
        await decode.changes.until(lambda: decode.running)
        late = asyncio.create_task(router.generate(request(max_tokens=5), timeout_s=20))
        while not len(router.fleet.waiting):  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
        with overloaded(router):
            decode.resume()
            error = await failed_call(late)
        await first
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "before its deadline" in error.details()
    assert len(decode.starts) == 1
