"""Clients of a router with keys, over HTTP and gRPC: who gets in, and what their limits do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.common.errors import ResourceExhaustedError
from baton.v1 import generation_pb2
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from router.config.security import RouterSecurityConfig
from router.config.tenants import TenantsConfig
from router.tenants.tenant import Tenant
from router.tenants.token_bucket import TokenBucket
from rpc.errors import from_rpc_error
from tests.support.fake_workers import EOS_TOKEN_ID, MODEL, FakeDecode, FakePrefill, FakeWorker
from tests.support.running_http import RunningHttp, running_http
from tests.support.running_router import PROMPT_IDS, request, script_of
from tests.support.tenants import KEY, OTHER_KEY, entry_of, write_tenants

SCRIPT = [*script_of("An answer."), EOS_TOKEN_ID]
ENDLESS = [50 + i % 200 for i in range(4000)]
COMPLETION = {"model": MODEL, "prompt": list(PROMPT_IDS), "max_tokens": 2}
MESSAGE = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
CLOSED_PATHS = ("/docs", "/openapi.json", "/redoc", "/version", "/v1/models", "/health/", "/x")
TOO_MANY = "this server answers 2 calls at the same time; try again later"
TEMPLATE = ChatTemplate(
    TemplateSource({"default": TemplateText("{{ messages[0].content }}", "test")}, {})
)


@asynccontextmanager
async def closed_router(
    folder: Path, *workers: FakeWorker, limits: Any = None, **config: Any
) -> AsyncIterator[RunningHttp]:
    """A router for the tenants a, which has limits, and b."""
    path = write_tenants(folder, entry_of("a", KEY, **(limits or {})), entry_of("b", OTHER_KEY))
    security = RouterSecurityConfig(tenants=TenantsConfig(tenants=path))
    workers = workers or (FakeDecode(SCRIPT),)
    async with running_http(
        *workers, security=security, chat_template=TEMPLATE, **config
    ) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def metadata(key: str, name: str = "authorization") -> tuple[tuple[str, str], ...]:
    return ((name, f"Bearer {key}" if name == "authorization" else key),)


def generate(api: RunningHttp, key: str | None, message: Any = None) -> Any:
    given = metadata(key) if key else ()
    return api.router.stub.Generate(message or request(max_tokens=2), metadata=given, timeout=30)


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


async def never() -> AsyncIterator[bytes]:
    """Requests that do not come."""
    await asyncio.Event().wait()
    yield b""


async def until(condition: Callable[[], object]) -> None:
    """Lets other tasks run until a condition holds, which they do not report."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def num_running_of(tenant: Tenant) -> int:
    with tenant._account.open() as counts:
        return counts.num_running


def openai_client(api: RunningHttp, key: str) -> openai.AsyncOpenAI:
    return api.openai.with_options(api_key=key)


# Who gets in.


async def test_http_asks_for_a_key_everywhere_but_for_health_and_the_page(tmp_path: Path):
    async with closed_router(tmp_path) as api:
        for path in ("/health", "/ready", "/ping", "/"):  # the page has no data of its own
            assert (await api.http.get(path)).status_code == 200
        for path in CLOSED_PATHS:
            answer = await api.http.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await api.http.get("/v1/models", headers=bearer(KEY))).status_code == 200
        for headers in (bearer("wrong"), {"Authorization": KEY}, {"x-api-key": KEY[:-1]}):
            answer = await api.http.post("/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["message"] == "the call lacks a valid credential"


async def test_official_clients_get_in_and_get_their_own_errors(tmp_path: Path):
    async with (
        closed_router(tmp_path) as api,
        anthropic.AsyncAnthropic(base_url=api.url, api_key=KEY, max_retries=0) as claude,
    ):
        good = openai_client(api, KEY)
        assert (await good.completions.create(**COMPLETION)).usage.completion_tokens == 2
        assert (await claude.messages.create(**MESSAGE)).role == "assistant"
        with pytest.raises(openai.AuthenticationError) as refused:
            await openai_client(api, "wrong").completions.create(**COMPLETION)
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await claude.with_options(api_key="wrong").messages.create(**MESSAGE)
        assert refused.value.body["error"]["type"] == "authentication_error"


async def test_grpc_asks_for_a_key_everywhere_but_for_health(tmp_path: Path):
    async with closed_router(tmp_path) as api:
        health = health_pb2_grpc.HealthStub(api.router.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        for key in (None, "wrong"):
            error = await error_of(generate(api, key))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert error.details() == "the call lacks a valid credential"
        model = generation_pb2.GetModelRequest()
        assert (await error_of(api.router.stub.GetModel(model))).code().name == "UNAUTHENTICATED"
        await api.router.stub.GetModel(model, metadata=metadata(KEY))
        await api.router.stub.GetModel(model, metadata=metadata(KEY, "x-api-key"))
        assert (await generate(api, KEY)).usage.completion_tokens == 2
        # The refusal does not wait for the request.
        silent = api.router.channel.stream_unary("/baton.v1.GenerationService/Generate")
        error = await error_of(silent(never(), metadata=metadata("wrong"), timeout=20))
        assert error.code().name == "UNAUTHENTICATED"
        reflection = reflection_pb2_grpc.ServerReflectionStub(api.router.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        call = reflection.ServerReflectionInfo(iter(asked))
        assert (await error_of(anext(aiter(call)))).code().name == "UNAUTHENTICATED"


async def test_a_model_that_is_not_listed_is_refused(tmp_path: Path):
    async with closed_router(tmp_path, limits={"models": "[other]"}) as api:
        with pytest.raises(openai.PermissionDeniedError, match="may not use model 'scripted'"):
            await openai_client(api, KEY).completions.create(**COMPLETION)
        answer = await api.http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": KEY})
        assert answer.json()["error"]["type"] == "permission_error"
        assert (await error_of(generate(api, KEY))).code().name == "PERMISSION_DENIED"
        listed = await api.http.get("/v1/models", headers=bearer(KEY))
        assert listed.json()["data"] == []
        named = await api.http.get("/v1/models/none", headers=bearer(KEY))
        assert named.status_code == 404
        assert MODEL not in named.text
        assert (await generate(api, OTHER_KEY)).usage.completion_tokens == 2


# Limits.


async def test_a_rate_limit_has_a_true_retry_after_in_each_protocol(tmp_path: Path):
    async with closed_router(tmp_path, limits={"requests_per_minute": 1}) as api:
        await generate(api, KEY)
        error = await error_of(generate(api, KEY))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        known = from_rpc_error(error)
        assert isinstance(known, ResourceExhaustedError)
        assert 30 < (known.retry_after_s or 0) <= 60
        with pytest.raises(openai.RateLimitError) as refused:
            await openai_client(api, KEY).completions.create(**COMPLETION)
        assert refused.value.body["type"] == "rate_limit_error"
        headers = refused.value.response.headers
        assert 30_000 < int(headers["retry-after-ms"]) <= 60_000
        assert 30 < int(headers["retry-after"]) <= 60
        answer = await api.http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": KEY})
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await generate(api, OTHER_KEY)).usage.completion_tokens == 2


async def test_tokens_of_prompts_and_answers_count(tmp_path: Path):
    async with closed_router(tmp_path, limits={"tokens_per_minute": 41}) as api:
        await generate(api, KEY)  # 40 and 2
        error = await error_of(generate(api, KEY))
        assert error.details() == "this client may use at most 41 tokens per minute"
        tenant = api.router.service._security.tenants.find([KEY])
        with tenant._account.open() as counts:
            bucket = TokenBucket(41, tenant._clock(), counts.tokens)
            assert bucket.wait_s(41, tenant._clock()) == pytest.approx(42 * 60 / 41, abs=3)


async def test_running_requests_are_limited_and_freed(tmp_path: Path):
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with closed_router(tmp_path, decode, limits={"max_concurrent_requests": 2}) as api:
        stream = api.router.stub.GenerateStream(
            request(max_tokens=4000), metadata=metadata(KEY), timeout=30
        )
        await stream.read()
        async with api.http.stream(
            "POST",
            "/v1/completions",
            json=COMPLETION | {"max_tokens": 4000, "stream": True},
            headers=bearer(KEY),
        ) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            refused = await api.http.get("/v1/models", headers=bearer(KEY))
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert (await error_of(generate(api, KEY))).code().name == "RESOURCE_EXHAUSTED"
            assert (await api.http.get("/v1/models", headers=bearer(OTHER_KEY))).is_success
        await decode.changes.until(lambda: decode.cancels)
        stream.cancel()
        tenant = api.router.service._security.tenants.find([KEY])
        await until(lambda: num_running_of(tenant) == 0)


async def test_each_prompt_of_a_call_counts_as_a_request(tmp_path: Path):
    limits = {"requests_per_minute": 4, "max_concurrent_requests": 3}
    async with closed_router(tmp_path, limits=limits) as api:
        client = openai_client(api, KEY)
        with pytest.raises(openai.BadRequestError, match="must have at most 3"):
            await client.completions.create(model=MODEL, prompt=["a"] * 4, max_tokens=1)
        await client.completions.create(model=MODEL, prompt=["a"] * 3, max_tokens=1)
        with pytest.raises(openai.RateLimitError, match="4 requests per minute"):
            await client.completions.create(**COMPLETION)


async def test_the_tokens_of_a_call_do_not_end_its_later_prompts(tmp_path: Path):
    async with closed_router(tmp_path, limits={"tokens_per_minute": 41}) as api:
        client = openai_client(api, KEY)
        arguments = COMPLETION | {"prompt": [COMPLETION["prompt"]] * 3}
        assert len((await client.completions.create(**arguments)).choices) == 3
        with pytest.raises(openai.RateLimitError, match="41 tokens per minute"):
            await client.completions.create(**COMPLETION)


async def test_a_refused_call_is_not_read(tmp_path: Path):
    http = {"max_request_bytes": 2**20}
    async with closed_router(tmp_path, http=http) as api:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for length, closes in ((100, False), (2**19, True)):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
            writer.write(f"{head}content-length: {length}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert answer.startswith(b"HTTP/1.1 401")
            assert (b"connection: close" in answer.lower()) == closes
            writer.close()


async def test_calls_in_excess_are_refused_before_they_are_read():
    decode = FakeDecode(ENDLESS, pause_after=3)
    limits = {"max_concurrent_requests": 1, "max_concurrent_calls": 2}
    async with running_http(decode, **limits) as api:
        running = api.router.stub.GenerateStream(request(max_tokens=4000), timeout=30)
        await running.read()
        assert "1 requests are running" in (await error_of(generate(api, None))).details()
        silent = api.router.channel.stream_unary("/baton.v1.GenerationService/Generate")
        waiting = silent(never(), timeout=30)
        await waiting.wait_for_connection()
        async with asyncio.timeout(20):
            # Another call takes the place of one whose request does not come.
            while not waiting.done():
                assert (await error_of(generate(api, None))).code().name == "RESOURCE_EXHAUSTED"
        assert (await error_of(waiting)).details() == TOO_MANY
        stub = health_pb2_grpc.HealthStub(api.router.channel)
        assert await stub.Check(health_pb2.HealthCheckRequest())  # has places of its own
        running.cancel()


async def test_callers_without_a_key_take_no_place_of_others(tmp_path: Path):
    limits = {"max_concurrent_requests": 1, "max_concurrent_calls": 2}
    async with closed_router(tmp_path, **limits) as api:
        silent = api.router.channel.stream_unary("/baton.v1.GenerationService/Generate")
        health = health_pb2_grpc.HealthStub(api.router.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=30) for _ in range(3)]
        for watch in watches:
            await watch.read()
        strangers = [silent(never(), timeout=30) for _ in range(3)]
        assert (await generate(api, KEY)).usage.completion_tokens == 2
        for call in (*watches, *strangers):
            call.cancel()


async def test_a_large_message_is_refused_before_it_is_parsed(tmp_path: Path):
    async with closed_router(tmp_path, http={"max_request_bytes": 10_000}) as api:
        error = await error_of(generate(api, KEY, request("x" * 20_000)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")


async def test_the_bodies_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path):
    async with closed_router(tmp_path, http={"max_request_bytes": 2**20}) as api:
        writers, heads = [], []
        for _ in range(5):
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {KEY}\r\ncontent-length: {2**20}\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
            writer.write(head.encode() + b"x" * (2**20 - 1))
            writers.append(writer)
            heads.append(asyncio.ensure_future(reader.readuntil(b"\r\n\r\n")))
        # The one that is too many is not always the last one.
        done, others = await asyncio.wait(heads, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert [head.result().startswith(b"HTTP/1.1 429") for head in done] == [True]
        for head in others:
            head.cancel()
        client = openai_client(api, OTHER_KEY)
        assert (await client.completions.create(**COMPLETION)).usage.completion_tokens == 2
        for writer in writers:
            writer.close()


# Priorities, caches and ids.


async def test_a_priority_is_lowered_to_the_tenants_limit(tmp_path: Path):
    decode = FakeDecode(SCRIPT)
    async with closed_router(tmp_path, decode, limits={"max_priority": 3}) as api:
        for key in (KEY, OTHER_KEY):
            message = request(max_tokens=2)
            message.priority = -7
            await generate(api, key, message)
    assert [start.spec.priority for start in decode.starts] == [3, -7]


async def test_two_tenants_share_no_cache(tmp_path: Path):
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with closed_router(tmp_path, prefill, decode) as api:
        counts = []
        for key in (KEY, KEY, OTHER_KEY, OTHER_KEY):
            await generate(api, key)
            counts.append(len(prefill.requests))
        salted = request(max_tokens=2)
        salted.cache_salt = decode.starts[-1].spec.cache_salt  # b's salt, which a states
        await generate(api, KEY, salted)
    assert counts == [1, 1, 2, 2]  # a prompt whose prefix decode caches is not computed again
    assert len(prefill.requests) == 3
    salts = [start.spec.cache_salt for start in decode.starts]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert salts[4] not in salts[:4]


async def test_two_tenants_may_use_the_same_request_id(tmp_path: Path):
    decode = FakeDecode(ENDLESS, pause_after=3)
    async with closed_router(tmp_path, decode) as api:
        message = request(request_id="same", max_tokens=4000)
        streams = [
            api.router.stub.GenerateStream(message, metadata=metadata(key), timeout=30)
            for key in (KEY, OTHER_KEY)
        ]
        for stream in streams:
            assert (await stream.read()).request_id == "same"
        error = await error_of(generate(api, KEY, message))
        assert "unique among running requests" in (error.details() or "")
        body = COMPLETION | {"max_tokens": 4000, "stream": True}
        for key in (KEY, OTHER_KEY):
            headers = {**bearer(key), "x-request-id": "mine"}
            async with api.http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as answer:
                assert '"id":"cmpl-mine"' in await anext(answer.aiter_lines())
        for stream in streams:
            stream.cancel()


async def awaited(call: Any) -> Any:
    return await call


async def test_a_tenant_with_few_requests_does_not_wait_for_all_of_another(tmp_path: Path):
    decode = FakeDecode(ENDLESS, pause_after=3, max_num_requests=1)
    async with closed_router(tmp_path, decode) as api:
        waiting = api.router.fleet.waiting
        calls = []
        for number, key in enumerate([KEY] * 12 + [OTHER_KEY]):
            message = request(request_id=f"{number}", max_tokens=100)
            calls.append(asyncio.create_task(awaited(generate(api, key, message))))
            await until(lambda number=number: len(waiting) == number)
            if not number:
                await decode.changes.until(lambda: decode.running)
        decode.resume()
        await asyncio.gather(*calls)
    ids = [start.spec.request_id.partition("/")[0] for start in decode.starts]
    assert ids.index("12") <= 6
    assert [each for each in ids if each != "12"] == [str(number) for number in range(12)]


# Calls beside requests.


async def test_calls_of_the_tokenizer_have_a_limit_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.stages.admission._MAX_TOKENIZING", 1)
    async with closed_router(tmp_path) as api:
        turns = api.router.service._admission.tokenizing
        async with turns.turn(), turns.turn():
            first = asyncio.create_task(
                api.http.post("/tokenize", json={"prompt": "a"}, headers=bearer(KEY))
            )
            await until(lambda: turns._num_waiting)
            for path, body in (
                ("/tokenize", {"prompt": "a"}),
                ("/detokenize", {"tokens": [1]}),
                ("/v1/messages/count_tokens", MESSAGE),
            ):
                answer = await api.http.post(path, json=body, headers=bearer(KEY))
                assert answer.status_code == 503, path
            message = generation_pb2.TokenizeRequest(text="a")
            call = api.router.stub.Tokenize(message, metadata=metadata(KEY))
            assert (await error_of(call)).code().name == "RESOURCE_EXHAUSTED"
            assert (await generate(api, KEY)).usage.completion_tokens == 2
        assert (await first).status_code == 200


# Secrets.


async def test_no_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    async with closed_router(tmp_path) as api:
        for key in (KEY, "wrong-secret"):
            await api.http.post("/v1/completions", json=COMPLETION, headers=bearer(key))
            await api.http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": key})
            await asyncio.gather(generate(api, key), return_exceptions=True)
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("baton")]
    assert any("UNAUTHENTICATED" in line for line in ours)
    assert not any(KEY in line or "wrong-secret" in line for line in ours)
