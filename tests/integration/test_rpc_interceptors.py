"""Errors, malformed messages, cancels and log lines, for calls of every arity."""

import asyncio
import logging
import sys
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.common.errors import InvalidArgumentError, ResourceExhaustedError
from baton.v1 import generation_pb2
from rpc.interceptors import CallInterceptor, name_call

SERVICE = "test.Echo"
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
INVALID_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string of two bytes that are not UTF-8
TRUNCATED = b"\x0a\x7f"


class Echo:
    """A service whose methods call `act(text, context)`, which each test sets."""

    def __init__(self):
        self.act = None
        self.ended = asyncio.Event()

    async def _act(self, request, context):
        try:
            return await self.act(request.text, context)
        finally:
            self.ended.set()

    async def unary_unary(self, request, context):
        return await self._act(request, context)

    async def unary_stream(self, request, context):
        yield await self._act(request, context)

    async def stream_unary(self, requests, context):
        async for request in requests:
            return await self._act(request, context)
        raise InvalidArgumentError("no request came")

    async def stream_stream(self, requests, context):
        async for request in requests:
            yield await self._act(request, context)


def handlers_of(echo):
    handlers = {
        arity: getattr(grpc, f"{arity}_rpc_method_handler")(
            getattr(echo, arity),
            request_deserializer=generation_pb2.TokenizeRequest.FromString,
            response_serializer=generation_pb2.DetokenizeResponse.SerializeToString,
        )
        for arity in ARITIES
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


@asynccontextmanager
async def serving(service, **limits):
    """Serves the methods that a service has now."""
    server = grpc.aio.server(interceptors=[CallInterceptor(**limits)])
    server.add_generic_rpc_handlers((handlers_of(service),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        service.channel = channel
        yield service
    await server.stop(0)


@pytest.fixture
async def echo():
    async with serving(Echo()) as service:
        yield service


def start_call(echo, arity, payload):
    method = getattr(echo.channel, arity)(
        f"/{SERVICE}/{arity}", response_deserializer=generation_pb2.DetokenizeResponse.FromString
    )
    return method(iter([payload]) if arity.startswith("stream") else payload, timeout=20)


async def call(echo, arity, payload):
    started = start_call(echo, arity, payload)
    if arity.endswith("unary"):
        return await started
    return await anext(aiter(started))


def text(value):
    return generation_pb2.TokenizeRequest(text=value).SerializeToString()


async def error_of(echo, arity, payload=None):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(echo, arity, text("x") if payload is None else payload)
    return caught.value


@pytest.mark.parametrize("arity", ARITIES)
async def test_responses_pass_through(echo, arity):
    async def act(request_text, context):
        return generation_pb2.DetokenizeResponse(text=request_text.upper())

    echo.act = act
    assert (await call(echo, arity, text("ok"))).text == "OK"


@pytest.mark.parametrize("arity", ARITIES)
async def test_baton_errors_become_their_status(echo, arity):
    async def act(request_text, context):
        raise ResourceExhaustedError("the queue is full")

    echo.act = act
    error = await error_of(echo, arity)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the queue is full"


@pytest.mark.parametrize("arity", ARITIES)
async def test_other_errors_are_internal_and_hide_their_details(echo, arity, caplog):
    async def act(request_text, context):
        raise RuntimeError("password=hunter2")

    echo.act = act
    error = await error_of(echo, arity)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "hunter2" not in error.details()
    assert "hunter2" in caplog.text  # the log has the cause


@pytest.mark.parametrize("arity", ARITIES)
async def test_an_abort_by_the_servicer_keeps_its_status(echo, arity):
    async def act(request_text, context):
        await context.abort(grpc.StatusCode.DATA_LOSS, "mine")

    echo.act = act
    error = await error_of(echo, arity)
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "mine")


@pytest.mark.parametrize("payload", [INVALID_UTF8, TRUNCATED], ids=["utf8", "truncated"])
@pytest.mark.parametrize("arity", ARITIES)
async def test_malformed_messages_are_invalid_arguments(echo, arity, payload):
    error = await error_of(echo, arity, payload)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid message" in error.details()
    assert not echo.ended.is_set()


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_cancel_reaches_the_servicer(echo, arity):
    started = asyncio.Event()

    async def act(request_text, context):
        started.set()
        await asyncio.Event().wait()

    echo.act = act
    rpc = start_call(echo, arity, text("x"))
    async with asyncio.timeout(10):
        await started.wait()
        rpc.cancel()
        await echo.ended.wait()


async def test_a_generator_is_closed_before_its_call_ends(echo, caplog):
    caplog.set_level(logging.INFO, logger="baton.rpc")

    async def endless(request, context):
        try:
            while True:
                yield generation_pb2.DetokenizeResponse(text="x" * 10_000)
        finally:
            logging.getLogger("baton.rpc").info("closed")

    service = Echo()
    service.unary_stream = endless
    async with serving(service):
        rpc = start_call(service, "unary_stream", text("x"))
        await rpc.read()
        rpc.cancel()
        line = await logged_call(caplog, f"/{SERVICE}/unary_stream")
    messages = [record.getMessage() for record in caplog.records]
    assert messages.index("closed") < messages.index(line)
    assert "code=CANCELLED" in line


@pytest.mark.parametrize("arity", ["unary_unary", "unary_stream"])
async def test_a_request_that_does_not_come_ends_its_call(arity):
    async with serving(Echo(), first_message_timeout_s=0.05) as service:
        method = getattr(service.channel, f"stream_{arity.removeprefix('unary_')}")
        call = method(f"/{SERVICE}/{arity}")(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match="request did not come in") as caught:
            await (call if arity.endswith("unary") else anext(aiter(call)))
        assert caught.value.code().name == "DEADLINE_EXCEEDED"
        assert not service.ended.is_set()


async def test_calls_in_excess_are_refused_until_others_end():
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def wait(text, context):
        begun.set()
        await may_end.wait()
        return generation_pb2.DetokenizeResponse(text=text)

    async with serving(Echo(), most_calls=1) as service:
        service.act = wait
        first = start_call(service, "unary_unary", text("x"))
        await begun.wait()
        for arity in ARITIES:
            assert (await error_of(service, arity)).code().name == "RESOURCE_EXHAUSTED"
        may_end.set()
        assert (await first).text == "x"
        assert (await call(service, "unary_unary", text("y"))).text == "y"


async def logged_call(caplog, method):
    """Waits for a call's log line, which may be written after the call's response."""
    async with asyncio.timeout(10):
        while True:
            for record in caplog.records:
                if record.getMessage().startswith(f"call method={method} "):
                    return record.getMessage()
            await asyncio.sleep(0.001)


async def test_a_call_is_logged_in_one_line(echo, caplog):
    caplog.set_level(logging.INFO, logger="baton.rpc")

    async def act(request_text, context):
        raise InvalidArgumentError("no")

    echo.act = act
    await error_of(echo, "unary_unary")
    line = await logged_call(caplog, f"/{SERVICE}/unary_unary")
    assert "code=INVALID_ARGUMENT" in line
    assert "duration_ms=" in line
    assert "peer=ipv4:127.0.0.1" in line


async def test_calls_of_prefill_workers_are_logged_only_if_they_fail(monkeypatch, caplog):
    """The router's line has the request that they belong to."""
    monkeypatch.setattr(sys.modules[__name__], "SERVICE", "baton.v1.PrefillService")
    caplog.set_level(logging.DEBUG, logger="baton.rpc")

    async def act(request_text, context):
        if request_text == "fail":
            raise InvalidArgumentError("no")
        return generation_pb2.DetokenizeResponse()

    async with serving(Echo()) as echo:
        echo.act = act
        await call(echo, "unary_unary", text("ok"))
        await logged_call(caplog, f"/{SERVICE}/unary_unary")
        await error_of(echo, "unary_stream", text("fail"))
        await logged_call(caplog, f"/{SERVICE}/unary_stream")
    levels = [one.levelname for one in caplog.records if one.getMessage().startswith("call ")]
    assert levels == ["DEBUG", "INFO"]


@pytest.mark.parametrize("arity", ARITIES)
async def test_an_id_set_by_the_servicer_is_in_the_error_and_in_the_log(echo, caplog, arity):
    caplog.set_level(logging.INFO, logger="baton.rpc")

    async def act(request_text, context):
        name_call("drawn")
        raise RuntimeError

    echo.act = act
    error = await error_of(echo, arity)
    assert error.details() == "internal error; request_id='drawn'"
    assert "request_id='drawn'" in await logged_call(caplog, f"/{SERVICE}/{arity}")


@pytest.mark.parametrize("arity", ARITIES)
async def test_a_cancel_of_what_a_method_waits_for_is_not_one_of_the_call(echo, caplog, arity):
    """A channel that is closed does so. The client must not wait for its deadline."""

    async def act(request_text, context):
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    echo.act = act
    error = await error_of(echo, arity)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "CancelledError" in caplog.text


def test_name_call_does_nothing_outside_of_a_call():
    name_call("drawn")


async def test_unknown_methods_are_unimplemented(echo):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo.channel.unary_unary(f"/{SERVICE}/nothing")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
