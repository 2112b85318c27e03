"""`CallInterceptor`: callers, error statuses and log lines of the calls of every Baton server.

- A server may ask who calls, before a message is received. Health is open to all.
- The calls at the same time are bounded, and those of health apart from the others: a
  caller without a credential takes no other's place. A call's first message must come soon.
- A request that is no valid message (torn bytes, invalid UTF-8) gets
  INVALID_ARGUMENT; grpc.aio alone would answer UNKNOWN.
- A `BatonError` becomes its status. Any other exception is logged with the
  request's id and becomes INTERNAL without its text.
- Each call writes one log line with the request's id: the message's own, or
  the one that the servicer sets with `name_call`. Other lines that are logged
  in the call have that id too, and the caller's trace id, if they are JSON.

A servicer's method is a coroutine function or an async generator function. A
generator is closed before its call ends, so its `finally` runs at once on a cancel.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from baton.reasons import Reason
from baton.traceparent import TraceContext, parse_traceparent
from rpc.errors import abort_with, status_of_number
from rpc.logs import CURRENT_CALL, CallInfo, log_fields

__all__ = ["Authorize", "CallInterceptor", "CountCall", "name_call", "request_id_of"]

_LOGGER = logging.getLogger("baton.rpc")
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_QUIET_METHODS = (
    *_OPEN_SERVICES,
    "/grpc.reflection.",
    # Routers ask now and then, and follow the load and the cache.
    "/baton.v1.WorkerService/GetLoad",
    "/baton.v1.WorkerService/GetInfo",
    "/baton.v1.WorkerService/WatchLoad",
    "/baton.v1.WorkerService/WatchKvEvents",
    "/baton.v1.ReplicaSetService/WatchReplicas",
    # `baton top` asks every two seconds.
    "/baton.v1.ClusterService/GetCluster",
)
_LONGEST_LOGGED_ID = 128
_MOST_OPEN_CALLS = 1000
"""Calls at the same time of services that are open to all."""
_FIRST_MESSAGE_TIMEOUT_S = 30.0
_RETRY_AFTER_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]
Authorize = Callable[[str, Context], object]
"""Returns who makes a call, the caller in `CURRENT_CALL`, given the method's full name.

Raises:
    UnauthenticatedError: the caller has no valid credential.
    PermissionDeniedError: the caller may not call this method.
"""

Deserialize = Callable[[bytes], Any]
CountCall = Callable[[str], None]
"""Counts a call that has ended, given the name of its status."""
Guard = Callable[[Context], AbstractAsyncContextManager["_Call"]]
"""What surrounds a call: `_guard`, for one method."""

_MAX_INLINE_BYTES = 256 * 1024
_LARGE_MESSAGES = ThreadPoolExecutor(1, "large-messages")

# By (request is a stream, response is a stream).
_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors to statuses and logs calls; the module's docstring lists the rules.

    Args:
        authorize: finds out who calls; None lets all callers in.
        count_call: called when a call ends, with the name of its status; not for calls that poll.
        most_calls: calls at the same time, health apart; further ones get RESOURCE_EXHAUSTED
            before their first message is received. None for no limit.
        first_message_timeout_s: a call whose first message has not come by then ends, if it has
            one message only.
    """

    def __init__(
        self,
        authorize: Authorize | None = None,
        count_call: CountCall | None = None,
        *,
        most_calls: int | None = None,
        first_message_timeout_s: float = _FIRST_MESSAGE_TIMEOUT_S,
    ) -> None:
        self._authorize = authorize
        self._count_call = count_call
        self._calls = _Places(most_calls)
        self._open_calls = _Places(_MOST_OPEN_CALLS)
        self._first_message_timeout_s = first_message_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; an unknown method's is None and stays None."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        is_open = method.startswith(_OPEN_SERVICES)
        authorize = None if is_open else self._authorize
        places = self._open_calls if is_open else self._calls
        count_call = None if method.startswith(_QUIET_METHODS) else self._count_call
        guard = partial(_guard, method, places, authorize, count_call)
        return _guarded_handler(handler, guard, self._first_message_timeout_s)


class _Places:
    """Bounds the calls at the same time.

    Args:
        most: how many; None for no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._num_taken = 0

    def __enter__(self) -> None:
        if self._num_taken == self._most:
            raise ResourceExhaustedError(
                f"this server answers {self._most} calls at the same time; try again later",
                _RETRY_AFTER_S,
                reason=Reason.CALLS_FULL,
            )
        self._num_taken += 1

    def __exit__(self, *exc_info: object) -> None:
        self._num_taken -= 1


def name_call(request_id: str) -> None:
    """Sets the request id for the present call's log line and INTERNAL error.

    Called by servicers that choose ids for requests. Has no effect outside of a call.
    """
    call = _CURRENT_CALL.get()
    if call is not None:
        call.info.request_id = request_id[:_LONGEST_LOGGED_ID]


def request_id_of(message: Any) -> str:
    """The request id in a message or in its `spec`; "" if it has none."""
    request_id = getattr(getattr(message, "spec", message), "request_id", "")
    return str(request_id)[:_LONGEST_LOGGED_ID]


def _note_trace(info: CallInfo, message: Any) -> None:
    """Takes the trace of a router's message to a worker, which is in the request's spec."""
    header = getattr(getattr(message, "spec", None), "traceparent", "")
    trace = parse_traceparent(header) if header else None
    if trace is not None:
        info.trace_id = trace.trace_id


def _guarded_handler(handler: Any, guard: Guard, first_message_timeout_s: float) -> Any:
    kind = _KINDS[handler.request_streaming, handler.response_streaming]
    function = _as_coroutine_function(getattr(handler, kind))
    # Parsing errors are raised where the method, or its guard, reads the requests.
    deserialize = _strict(handler.request_deserializer)
    if handler.request_streaming:
        guarded = _guard_stream(function, guard)
    else:
        guarded = _guard_unary(function, guard, first_message_timeout_s, deserialize)
    # On the wire a single request is a stream of one. As a stream, it is not received before the
    # call's guard has let the caller in.
    factory = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return factory(
        guarded,
        # A single request stays bytes, as gRPC would parse it on the event loop.
        request_deserializer=deserialize if handler.request_streaming else None,
        response_serializer=handler.response_serializer,
    )


def _guard_unary(
    function: Method, guard: Guard, first_message_timeout_s: float, deserialize: Deserialize
) -> Any:
    async def guarded(requests: AsyncIterator[bytes], context: Context) -> Any:
        async with guard(context) as call:
            data = await _first(requests, first_message_timeout_s)
            request = await _parsed(data, deserialize)
            del data
            call.info.request_id = request_id_of(request)
            _note_trace(call.info, request)
            return await function(request, context)

    return guarded


async def _parsed(data: bytes, deserialize: Deserialize) -> Any:
    """Parses a message. A thread parses large ones, one at a time: millions of empty prompts take
    a third of a second, and sixteen times their bytes.
    """
    if len(data) <= _MAX_INLINE_BYTES:
        return deserialize(data)
    return await asyncio.get_running_loop().run_in_executor(_LARGE_MESSAGES, deserialize, data)


async def _first(requests: AsyncIterator[bytes], timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            request = await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceededError(
            f"the call's request did not come in {timeout_s:g} s",
            reason=Reason.REQUEST_NOT_RECEIVED,
        ) from None
    if request is None:
        raise InvalidArgumentError("the call has no request", reason=Reason.MALFORMED_MESSAGE)
    return request


def _guard_stream(function: Method, guard: Guard) -> Any:
    async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
        async with guard(context):
            return await function(requests, context)

    return guarded


def _as_coroutine_function(function: Any) -> Method:
    """Turns a generator of responses into a coroutine function that writes them."""
    if not inspect.isasyncgenfunction(function):
        return function  # type: ignore[no-any-return]

    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(function(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _strict(deserialize: Deserialize | None) -> Deserialize:
    def deserialize_strictly(data: bytes) -> Any:
        if deserialize is None:
            return data
        try:
            return deserialize(data)
        except Exception as error:  # protobuf's parsers raise types of their own
            raise InvalidArgumentError(
                "the request is not a valid message: torn bytes, or a string that is not UTF-8",
                reason=Reason.MALFORMED_MESSAGE,
            ) from error

    return deserialize_strictly


class _Call:
    """One call, and its log line."""

    def __init__(self, method: str, context: Context) -> None:
        self.method = method
        self.context = context
        self.info = CallInfo(trace=_trace_of(context))
        self.status: grpc.StatusCode | None = None

    @property
    def code(self) -> str:
        """The name of its status, once it has ended."""
        return (self.status or status_of_number(_number(self.context.code()))).name

    def log(self) -> None:
        level = logging.DEBUG if self.method.startswith(_QUIET_METHODS) else logging.INFO
        if not _LOGGER.isEnabledFor(level):
            return
        code = self.code
        duration_ms = round((time.monotonic() - self.info.started_at) * 1000, 1)
        peer, request_id = self.context.peer(), self.info.request_id
        _LOGGER.log(
            level,
            "call method=%s code=%s duration_ms=%.1f peer=%s request_id=%s",
            *(self.method, code, duration_ms, peer, ascii(request_id)),
            extra=log_fields(method=self.method, code=code, duration_ms=duration_ms, peer=peer),
        )


def _trace_of(context: Context) -> TraceContext | None:
    """The caller's span, from the call's metadata."""
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent" and isinstance(value, str):
            return parse_traceparent(value)
    return None


_CURRENT_CALL: ContextVar[_Call | None] = ContextVar("current_call", default=None)


@asynccontextmanager
async def _guard(
    method: str,
    places: _Places,
    authorize: Authorize | None,
    count_call: CountCall | None,
    context: Context,
) -> AsyncIterator[_Call]:
    call = _Call(method, context)
    _CURRENT_CALL.set(call)  # a call runs in a task of its own
    CURRENT_CALL.set(call.info)
    try:
        with places:
            if authorize is not None:
                call.info.caller = authorize(call.method, call.context)
            yield call
    except asyncio.CancelledError:
        call.status = _cancel_status(call.context)
        raise
    except grpc.aio.AbortError:
        raise  # the method has set a status itself
    except BatonError as error:
        await abort_with(call.context, error)
    except Exception:
        request_id = ascii(call.info.request_id)
        _LOGGER.exception("failed method=%s request_id=%s", call.method, request_id)
        await abort_with(call.context, InternalError(f"internal error; request_id={request_id}"))
    finally:
        call.log()
        if count_call is not None:
            count_call(call.code)


def _cancel_status(context: Context) -> grpc.StatusCode:
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


def _number(code: Any) -> int:
    """The number of a status. `context.code()` may be a number, a StatusCode or None."""
    return code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
