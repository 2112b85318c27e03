"""A way to meet each refusal in the table of generation.proto, on a router with fake workers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.common.errors import UnavailableError
from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router import servicer
from router.config.http import HttpConfig
from router.config.security import RouterSecurityConfig
from router.config.tenants import TenantsConfig
from rpc.channels import open_channel
from rpc.interceptors import CallInterceptor
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from tests.support.fake_workers import FakeDecode, FakeWorker, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    RunningRouter,
    failed_call,
    request,
    running_router,
)
from tests.support.tenants import (
    AUDIENCE,
    ISSUER,
    JWT_KEYS,
    KEY,
    entry_of,
    jwk_of,
    token_of,
    write_jwks,
    write_tenants,
)

GENERATE = "/baton.v1.GenerationService/Generate"
UNKNOWN_FIELD = b"\xb0\x0d\x01"
"""Field 214, a varint."""
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
SCRIPT = [50 + i % 200 for i in range(100)]

Meet = Callable[[Path, pytest.MonkeyPatch], Awaitable[tuple[grpc.aio.AioRpcError, str | None]]]
"""Meets a refusal; returns it and the field that it must name, if the table does not."""

REFUSALS: dict[tuple[str, str], Meet] = {}
"""By code and reason."""


def refusal(code: str, reason: str) -> Callable[[Any], Any]:
    """Registers the way to meet a refusal."""

    def register(meet: Any) -> Any:
        REFUSALS[code, reason] = meet
        return meet

    return register


@asynccontextmanager
async def router_of(*workers: FakeWorker, **config: Any) -> AsyncIterator[RunningRouter]:
    """A router with workers, by default one."""
    workers = workers or (FakeDecode(SCRIPT),)
    async with running_workers(*workers), running_router(*workers, **config) as router:
        yield router


def simple(
    message: generation_pb2.GenerateRequest, field: str | None = None, **config: Any
) -> Meet:
    """A message that a router refuses."""

    async def meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        async with router_of(**config) as router:
            return await failed_call(router.stub.Generate(message, timeout=20)), field

    return meet


def sent(data: bytes) -> Meet:
    """Bytes that a router refuses."""

    async def meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        async with router_of() as router:
            return await failed_call(router.channel.unary_unary(GENERATE)(data, timeout=20)), None

    return meet


def sampling(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        text="hello", sampling=common_pb2.SamplingParams(**fields)
    )


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def as_tenant(folder: Path, key: str = KEY, num_calls: int = 1, **limits: Any) -> Any:
    """Calls as a client with limits; returns the error of the last call."""
    tenants = write_tenants(folder, entry_of("a", KEY, **limits))
    jwks = write_jwks(folder, *(jwk_of(name, key) for name, key in JWT_KEYS.items()))
    config = TenantsConfig(
        tenants=tenants, jwks_file=jwks, jwt_issuer=ISSUER, jwt_audience=AUDIENCE
    )
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with router_of(decode, security=RouterSecurityConfig(tenants=config)) as router:
        for _ in range(num_calls - 1):
            await stream_as(router, key).read()
        return await failed_call(stream_as(router, key).read())


def stream_as(router: RunningRouter, key: str) -> Any:
    return router.stub.GenerateStream(request(max_tokens=4), metadata=metadata(key), timeout=20)


REFUSALS |= {
    ("INVALID_ARGUMENT", "INVALID_ARGUMENT"): simple(sampling(temperature=-1), "temperature"),
    ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"): sent(b"\x0a\xff"),
    ("FAILED_PRECONDITION", "UNKNOWN_FIELD"): sent(request().SerializeToString() + UNKNOWN_FIELD),
    ("FAILED_PRECONDITION", "NOT_CONFIGURED"): simple(
        sampling(thinking_token_budget=3), "thinking_token_budget"
    ),
    ("NOT_FOUND", "MODEL_NOT_FOUND"): simple(generation_pb2.GenerateRequest(text="a", model="x")),
}


@refusal("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
async def long_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with router_of(FakeDecode(SCRIPT, max_model_len=len(PROMPT_IDS))) as router:
        return await failed_call(router.generate(request())), "prompt"


@refusal("FAILED_PRECONDITION", "NO_REPLICA_FITS")
async def too_large_for_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One replica has too few seats, and the other one too few blocks."""
    workers = FakeDecode(SCRIPT, max_num_seqs=1), FakeDecode(SCRIPT, num_blocks=12, max_num_seqs=4)
    async with router_of(*workers, queue_timeout_s=0.05) as router:
        message = request(max_tokens=30)
        message.sampling.n = 2
        return await failed_call(router.generate(message)), None


@refusal("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
async def repeated_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with router_of(FakeDecode(SCRIPT, pause_after=1)) as router:
        running = router.stub.GenerateStream(request(request_id="a"), timeout=20)
        await running.read()
        return await failed_call(router.generate(request(request_id="a"))), None


@refusal("RESOURCE_EXHAUSTED", "ROUTER_FULL")
async def one_request_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with router_of(decode, max_concurrent_requests=1) as router:
        running = router.stub.GenerateStream(request(), timeout=20)
        await running.read()
        return await failed_call(router.generate(request())), None


@refusal("RESOURCE_EXHAUSTED", "CALLS_FULL")
async def one_call_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two calls are open: one runs, and the other one's request does not come. A third one gets its
    place.
    """
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with router_of(decode, max_concurrent_requests=1, max_concurrent_calls=2) as router:
        await router.stub.GenerateStream(request(), timeout=20).read()
        silent = router.channel.stream_unary(GENERATE)(never(), timeout=20)
        await silent.wait_for_connection()
        while not silent.done():  # it may not have arrived yet
            await failed_call(router.generate(request()))
        return await failed_call(silent), None


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@refusal("RESOURCE_EXHAUSTED", "REPLICAS_FULL")
async def full_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode = FakeDecode(SCRIPT, max_num_requests=1)
    async with router_of(decode, queue_timeout_s=0.05) as router:
        decode.current_load.num_running = 1
        await router.until(lambda: not router.fleet.decode.candidates[0].has_room)
        return await failed_call(router.generate(request())), None


@refusal("RESOURCE_EXHAUSTED", "OVERLOADED")
async def late_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with router_of() as router:
        backlog = router.model._backlog
        with ExitStack() as others:
            for _ in range(10):
                others.enter_context(backlog.place(0))
            with backlog.place(0) as place:
                place.entered_at -= 60
            return await failed_call(router.generate(request(), timeout_s=20)), None


@refusal("RESOURCE_EXHAUSTED", "SLO_TTFT")
async def late_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await with_slo("x-slo-ttft-ms"), None


@refusal("RESOURCE_EXHAUSTED", "SLO_TPOT")
async def slow_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await with_slo("x-slo-tpot-ms"), None


async def with_slo(header: str) -> grpc.aio.AioRpcError:
    """Returns the refusal of a request that asks for 50 ms where others take a second."""
    async with router_of() as router:
        backlog = router.model._backlog
        with backlog.place(0):
            with backlog.place(0) as place:
                place.entered_at -= 1
                backlog.begin(place)
                place.begun_at -= 10
                place.num_tokens = 11
            call = router.stub.Generate(request(), timeout=60, metadata=((header, "50"),))
            return await failed_call(call)


@refusal("RESOURCE_EXHAUSTED", "CLIENT_RATE")
async def too_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await as_tenant(folder, num_calls=2, requests_per_minute=1), None


@refusal("RESOURCE_EXHAUSTED", "CLIENT_CONCURRENCY")
async def too_many_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await as_tenant(folder, num_calls=2, max_concurrent_requests=1), None


@refusal("RESOURCE_EXHAUSTED", "ANSWER_TOO_LARGE")
async def long_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The request ends as soon as it is known, not when its last token comes."""
    monkeypatch.setattr(servicer, "MAX_MESSAGE_BYTES", 64)
    async with router_of(FakeDecode(SCRIPT, pause_after=80)) as router:
        call = router.stub.Generate(request(max_tokens=90), timeout=20)
        return await failed_call(call), None


@refusal("UNAVAILABLE", "NO_REPLICA_READY")
async def no_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with running_router(decode=("127.0.0.1:1",), queue_timeout_s=0.05) as router:
        return await failed_call(router.generate(request())), None


@refusal("UNAVAILABLE", "NOT_RESUMED")
async def lost_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode = FakeDecode(SCRIPT, pause_after=2)
    async with router_of(decode, resume_timeout_s=0.05) as router:
        running = asyncio.create_task(router.generate(request()))
        await decode.changes.until(lambda: decode.num_sent == 2)
        await decode.stop()
        return await failed_call(running), None


@refusal("UNAVAILABLE", "SERVER_STARTING")
async def starting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    server = RpcServer(ServerConfig(), ("baton.v1.GenerationService",))
    await server.listen()
    async with open_channel(server.address) as channel:
        error = await failed_call(channel.unary_unary(GENERATE)(b"", timeout=20))
    await server.stop(0)
    return error, None


@refusal("UNAVAILABLE", "SERVER_STOPPING")
async def stopping(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode = FakeDecode(SCRIPT, pause_after=1)
    async with router_of(decode) as router:
        running = asyncio.create_task(router.generate(request()))
        await decode.changes.until(lambda: decode.running)
        await router.server.stop(0)
        return await failed_call(running), None


@refusal("DEADLINE_EXCEEDED", "REQUEST_DEADLINE")
async def late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The router knows a deadline that this client, which waits for the answer, does not."""
    monkeypatch.setattr(servicer, "_timeout_s", lambda context: 0.05)
    async with router_of(FakeDecode(SCRIPT, pause_after=1)) as router:
        return await failed_call(router.generate(request(), timeout_s=None)), None


@refusal("DEADLINE_EXCEEDED", "ROUTER_DEADLINE")
async def too_long_for_the_router(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with router_of(FakeDecode(SCRIPT, pause_after=1), default_timeout_s=0.1) as router:
        error = await failed_call(router.generate(request(), timeout_s=None))
        assert "--default-timeout-s" in error.details()
        return error, None


@refusal("DEADLINE_EXCEEDED", "REQUEST_NOT_RECEIVED")
async def silent_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    defaults = CallInterceptor.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "first_message_timeout_s", 0.05)
    async with router_of() as router:
        return await failed_call(router.channel.stream_unary(GENERATE)(never(), timeout=20)), None


@refusal("DEADLINE_EXCEEDED", "ANSWER_NOT_READ")
async def not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    http = HttpConfig(port=None, send_timeout_s=0.1)
    async with (
        router_of(FakeDecode(SCRIPT), http=http) as router,
        grpc.aio.insecure_channel(router.server.address, _SMALL_WINDOW) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(request(request_id="n" * 120, max_tokens=len(SCRIPT)))
        await call.read()
        for _ in range(2000):
            if not router.server.num_calls:
                break
            await asyncio.sleep(0.01)
        return await failed_call(_read_all(call)), None


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@refusal("ABORTED", "REPLICAS_LOST")
async def four_lost_replicas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    decodes = [FakeDecode(SCRIPT, pause_after=0) for _ in range(5)]
    async with router_of(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=12)))
        for num_tokens in range(1, 5):
            for decode in decodes:
                decode.resume(num_tokens)
            waits = [
                asyncio.ensure_future(
                    decode.changes.until(lambda d=decode: d.running and d.num_sent)
                )
                for decode in decodes
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait, decode in zip(waits, decodes, strict=True):
                wait.cancel()
                if decode.running:
                    decode.fail_running(UnavailableError("has stopped"))
        return await failed_call(task), None


@refusal("UNAUTHENTICATED", "UNAUTHENTICATED")
async def wrong_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await as_tenant(folder, key="wrong"), None


@refusal("PERMISSION_DENIED", "MODEL_NOT_ALLOWED")
async def another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await as_tenant(folder, models="[other]"), None


@refusal("PERMISSION_DENIED", "PERMISSION_DENIED")
async def unlisted_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return await as_tenant(folder, key=token_of(sub="stranger")), None


@refusal("INTERNAL", "INTERNAL")
async def bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with router_of() as router:
        monkeypatch.setattr(router.model, "enter", lambda timeout_s: {}["secret"])
        return await failed_call(router.stub.Generate(request(), timeout=20)), None
