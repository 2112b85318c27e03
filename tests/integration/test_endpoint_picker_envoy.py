"""A real Envoy that asks a router's endpoint picker, in front of routers beside decode workers."""

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest

from router.config.endpoint_picker import EndpointPickerConfig
from router.config.http import HttpConfig
from router.endpoint_picker.exchange import Exchange
from tests.support.conditions import until
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode, running_workers
from tests.support.ports import reserved_port
from tests.support.proxies import require_proxy, running_picking_envoy
from tests.support.running_router import running_router, script_of

pytestmark = pytest.mark.slow

HOSTS = ("127.0.0.2", "127.0.0.3")
FALLBACK = "127.0.0.4"
COMPLETIONS = "/v1/completions"


def answer_of(host):
    return f"from {host}"


class Pods:
    """Decode workers, each with a router at its address, a router with the picker, and Envoy.

    Attributes:
        workers: the workers, which answer with their address.
        picker: the router with the picker, which answers too, as a gateway's last resort.
        http: a client of Envoy.
    """

    def __init__(self, workers, servers, picker, http, admin_url, stop_picker):
        self.workers, self.picker, self.http = workers, picker, http
        self.stop_picker = stop_picker
        self._servers = servers
        self._admin_url = admin_url

    async def stop_server(self, host):
        """Stops the router at an address, but not the worker beside it."""
        await self._servers[host].aclose()

    async def until_picker_is_lost(self):
        """Waits until Envoy's health check has noticed that the picker has gone."""
        async with asyncio.timeout(60):
            while True:
                text = (await self.http.get(f"{self._admin_url}/clusters")).text
                if re.search(r"^picker::.*::health_flags::.*failed_active_hc", text, re.MULTILINE):
                    return
                await asyncio.sleep(0.1)

    async def post(self, prompt, *, headers=None, **fields):
        body = {"prompt": prompt, "max_tokens": 40, **fields}
        return await self.http.post(COMPLETIONS, json=body, headers=headers)

    async def text(self, prompt, **fields):
        answer = await self.post(prompt, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


@asynccontextmanager
async def running_pods(folder, response_body_mode="NONE", **info):
    require_proxy("envoy")
    workers = [FakeDecode([*script_of(answer_of(h)), EOS_TOKEN_ID], host=h, **info) for h in HOSTS]
    server_port, picker_port = reserved_port(), reserved_port()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_workers(*workers))
        servers = {host: await stack.enter_async_context(AsyncExitStack()) for host in HOSTS}
        for worker in workers:
            http = HttpConfig(host=worker.host, port=server_port)
            router = running_router(worker, http=http)
            await servers[worker.host].enter_async_context(router)
        picker_stack = await stack.enter_async_context(AsyncExitStack())
        config = EndpointPickerConfig(endpoint_picker_port=picker_port, endpoint_port=server_port)
        picker = await picker_stack.enter_async_context(running_router(*workers, picker=config))
        last = [*script_of(answer_of(FALLBACK)), EOS_TOKEN_ID]
        last_worker = FakeDecode(last, host=FALLBACK)
        await stack.enter_async_context(running_workers(last_worker))
        http = HttpConfig(host=FALLBACK, port=server_port)
        await stack.enter_async_context(running_router(last_worker, http=http))
        url, admin_url = await stack.enter_async_context(
            running_picking_envoy(
                folder,
                ("127.0.0.1", picker_port),
                (FALLBACK, server_port),
                response_body_mode=response_body_mode,
            )
        )
        http = httpx2.AsyncClient(base_url=url, timeout=30, verify=False)
        await stack.enter_async_context(http)
        yield Pods(workers, servers, picker, http, admin_url, picker_stack.aclose)


async def test_prompts_stay_with_their_server(tmp_path):
    async with running_pods(tmp_path) as pods:
        first, second = "first " * 40, "second " * 40
        home = await pods.text(first)
        assert home in map(answer_of, HOSTS)
        (other,) = {*map(answer_of, HOSTS)} - {home}
        host = other.removeprefix("from ")
        refused = await pods.post(second, headers={"x-test-subset": f"{host}:1"})
        assert refused.status_code == 503
        for value in (host, f"10.9.9.9:80,{host}"):
            assert await pods.text(second, headers={"x-test-subset": value}) == other
        assert await pods.text(second) == other
        assert await pods.text(first) == home
        models = await pods.http.get("/v1/models")
        assert models.json()["data"]


@pytest.mark.parametrize("response_body_mode", ["NONE", "FULL_DUPLEX_STREAMED"])
async def test_streams_and_large_bodies_come_whole(tmp_path, response_body_mode):
    async with running_pods(tmp_path, response_body_mode) as pods:
        body = {"prompt": "a" * 4000, "stream": True, "max_tokens": 40, "user": "u" * 300_000}
        async with pods.http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines()]
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) in map(answer_of, HOSTS)
        bad = await pods.http.post(COMPLETIONS, content=b"{", headers=JSON)
        assert bad.status_code == 400  # of the server's router


async def test_the_picker_is_not_asked_about_an_answer_that_has_begun(tmp_path):
    """So the tokens do not pass through it, and a stream does not end with it."""
    async with running_pods(tmp_path, pause_after=1) as pods:
        server = pods.picker.service._servers[1]
        body = {"prompt": "a" * 50, "stream": True, "max_tokens": 40}
        async with pods.http.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            assert first.startswith("data: ")
            await until(lambda: not server.num_calls)
            await pods.stop_picker()
            for worker in pods.workers:
                worker.resume()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_server_that_fails_leaves_its_requests_to_others(tmp_path, monkeypatch):
    """Although its worker serves and is connected."""
    monkeypatch.setattr("router.endpoint_picker.servers._INTERVAL_S", 0.05)
    async with running_pods(tmp_path) as pods:
        prompt = "first " * 40
        home = await pods.text(prompt)
        (other,) = {*map(answer_of, HOSTS)} - {home}
        await pods.stop_server(home.removeprefix("from "))
        async with asyncio.timeout(20):
            while (await pods.post(prompt)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [await pods.text(prompt) for _ in range(3)] == [other] * 3


JSON = {"content-type": "application/json"}


async def test_full_servers_are_429(tmp_path):
    async with running_pods(tmp_path, max_num_requests=1, pause_after=1) as pods:
        running = [asyncio.create_task(pods.text("x" * 50)) for _ in HOSTS]
        for worker in pods.workers:
            await worker.changes.until(lambda worker=worker: worker.starts)
        refused = await pods.post("x" * 50)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert refused.json()["error"]["code"] == "overloaded"
        for worker in pods.workers:
            worker.resume()
        assert sorted(await asyncio.gather(*running)) == sorted(map(answer_of, HOSTS))


async def test_a_picker_that_is_late_costs_no_answer(tmp_path, monkeypatch):
    take = Exchange.take

    async def take_late(exchange, message):
        if message.HasField("response_headers"):
            await asyncio.sleep(0.5)  # Envoy's own limit is 0.2 s
        return await take(exchange, message)

    monkeypatch.setattr(Exchange, "take", take_late)
    async with running_pods(tmp_path) as pods:
        assert await pods.text("x" * 50) in map(answer_of, HOSTS)


async def test_without_a_picker_requests_go_to_any_router(tmp_path):
    """And clients cannot name a server."""
    async with running_pods(tmp_path) as pods:
        named = {"x-gateway-destination-endpoint": f"{HOSTS[0]}:1"}
        assert await pods.text("x", headers=named) in map(answer_of, HOSTS)
        pods.picker.service.announce_stop()  # it serves on for --shutdown-delay-s
        await pods.until_picker_is_lost()
        for headers in (None, named):
            assert await pods.text("x" * 50, headers=headers) == answer_of(FALLBACK)
        await pods.stop_picker()
        assert await pods.text("x" * 50) == answer_of(FALLBACK)
