"""`CallInterceptor`: callers, error statuses and log lines of the calls of every Baton server.

- A server may ask who calls, before a message is received. Health is open to all.
- The calls at the same time are bounded, each kind of them apart (`rpc.places`): neither a
  caller without a credential nor a call without an end takes another's place. A call's first
  message must come soon.
- A request that is no valid message (torn bytes, invalid UTF-8) gets
  INVALID_ARGUMENT; grpc.aio alone would answer UNKNOWN.
- A `BatonError` becomes its status. Any other exception is logged with the
  request's id and becomes INTERNAL without its text.
- A client that leaves ends its call as CANCELLED, or as DEADLINE_EXCEEDED if its deadline has
  passed, wherever the call is then. A client that does not read ends it after a time
  (`rpc.call`). A server that stops ends the rest as UNAVAILABLE.
- Each call writes one log line with the request's id: the message's own, or
  the one that the servicer sets with `name_call`. Other lines that are logged
  in the call have that id too, and the caller's trace id, if they are JSON.

A servicer's method is a coroutine function or an async generator function. A
generator is closed before its call ends, so its `finally` runs at once on a cancel.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, NoReturn, cast

import grpc

from baton.common.errors import (
    BatonError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    Reason,
    UnavailableError,
)
from baton.common.observe.traceparent import parse_traceparent
from rpc.call import QUIET_METHODS, Call, CallContext, Context
from rpc.logs import CURRENT_CALL, CallInfo, serving
from rpc.places import CallPlaces

__all__ = ["Authorize", "CallInterceptor", "CountCall", "name_call", "request_id_of"]

_LOGGER = logging.getLogger("baton.rpc")
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_MAX_LOGGED_ID_CHARS = 128
_FIRST_MESSAGE_TIMEOUT_S = 30.0
_CUT = "this server stops, and the call has not ended within --drain-timeout-s; try another server"

Method = Callable[[Any, CallContext], Awaitable[None]]
Authorize = Callable[[str, Context], object]
"""Returns who makes a call, the caller in `CURRENT_CALL`, given the method's full name.

Raises:
    UnauthenticatedError: the caller has no valid credential.
    PermissionDeniedError: the caller may not call this method.
"""

Deserialize = Callable[[bytes], Any]
CountCall = Callable[[str], None]
"""Counts a call that has ended, given the name of its status."""
Guard = Callable[[Context], AbstractAsyncContextManager[Call]]
"""What surrounds a call: `_guard`, for one method."""

_MAX_INLINE_BYTES = 256 * 1024
_MAX_GUARDED = 256
"""The most handlers that are kept: a server has fewer methods. One that is starting has a handler
for every name."""
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
        most_calls: calls at the same time, apart from those of health and reflection; further
            ones get RESOURCE_EXHAUSTED before their first message is received. None for no limit.
        most_watches: streams of the health service at the same time; None for no limit.
        first_message_timeout_s: a call whose first message has not come by then ends, if it has
            one message only.
        send_timeout_s: a call whose client reads nothing for so long ends; None for no limit.

    Attributes:
        num_begun: how many calls have begun.
    """

    def __init__(
        self,
        authorize: Authorize | None = None,
        count_call: CountCall | None = None,
        *,
        most_calls: int | None = None,
        most_watches: int | None = None,
        first_message_timeout_s: float = _FIRST_MESSAGE_TIMEOUT_S,
        send_timeout_s: float | None = None,
    ) -> None:
        self.num_begun = 0
        self._running: set[Call] = set()
        self._guarded: dict[tuple[Any, Any], Any] = {}  # by a method and its handler
        self._authorize = authorize
        self._count_call = count_call
        self._places = CallPlaces(most_calls, most_watches)
        self._first_message_timeout_s = first_message_timeout_s
        self._send_timeout_s = send_timeout_s

    @property
    def num_calls(self) -> int:
        """How many calls run, apart from those of health and reflection."""
        return self._places.calls.num_taken

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; an unknown method's is None and stays None."""
        self.num_begun += 1
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        key = handler_call_details.method, handler
        guarded = self._guarded.get(key)
        if guarded is None:
            guard = partial(self._guard, str(handler_call_details.method))
            guarded = _guarded_handler(handler, guard, self._first_message_timeout_s)
            if len(self._guarded) < _MAX_GUARDED:
                self._guarded[key] = guarded
        return guarded

    @asynccontextmanager
    async def _guard(self, method: str, context: Context) -> AsyncIterator[Call]:
        """Surrounds a call. Yields it once the caller is let in."""
        call = Call(method, CallContext(context, self._send_timeout_s))
        self._running.add(call)
        with serving(call.info):
            try:
                with self._places.of_method(method).taken_by(call):
                    if self._authorize is not None and not method.startswith(_OPEN_SERVICES):
                        call.info.caller = self._authorize(method, cast("Context", call.context))
                    yield call
            except asyncio.CancelledError:
                if call.ending is not None:
                    await call.abort(call.ending)
                if not call.has_been_left:
                    await self._fail(call)  # what the method waited for was cancelled, not the call
                call.note_client_left()
                raise
            except grpc.aio.AbortError:
                raise  # the method has set a status itself
            except BatonError as error:
                await call.abort(error)
            except Exception:
                await self._fail(call)
            finally:
                self._end(call)

    async def _fail(self, call: Call) -> NoReturn:
        """Ends a call whose method has raised what no client may see."""
        request_id = ascii(call.info.request_id)
        _LOGGER.exception("failed method=%s request_id=%s", call.method, request_id)
        await call.abort(InternalError(f"internal error; request_id={request_id}"))

    def cut_calls(self) -> None:
        """Ends all calls as UNAVAILABLE, as the server stops."""
        for call in self._running:
            call.end(UnavailableError(_CUT, reason=Reason.SERVER_STOPPING))

    def _end(self, call: Call) -> None:
        self._running.discard(call)
        call.context.close()
        call.log()
        if self._count_call is not None and not call.method.startswith(QUIET_METHODS):
            self._count_call(call.code)


def name_call(request_id: str) -> None:
    """Sets the request id for the present call's log line and INTERNAL error.

    Called by servicers that choose ids for requests. Has no effect outside of a call.
    """
    info = CURRENT_CALL.get()
    if info is not None:
        info.request_id = request_id[:_MAX_LOGGED_ID_CHARS]


def request_id_of(message: Any) -> str:
    """The request id in a message or in its `spec`; "" if it has none."""
    request_id = getattr(getattr(message, "spec", message), "request_id", "")
    return str(request_id)[:_MAX_LOGGED_ID_CHARS]


def _note_trace(info: CallInfo, message: Any) -> None:
    """Takes the trace of a router's message to a worker, which is in the request's spec."""
    header = getattr(getattr(message, "spec", None), "traceparent", "")
    trace = parse_traceparent(header) if header else None
    if trace is not None:
        info.trace_id = trace.trace_id


def _guarded_handler(handler: Any, guard: Guard, first_message_timeout_s: float) -> Any:
    kind = _KINDS[handler.request_streaming, handler.response_streaming]
    function = _writing(getattr(handler, kind), streams=handler.response_streaming)
    # Parsing errors are raised where the method, or its guard, reads the requests.
    deserialize = _strict(handler.request_deserializer)
    if handler.request_streaming:
        guarded = _guard_stream(function, guard)
    else:
        guarded = _guard_unary(function, guard, first_message_timeout_s, deserialize)
    # On the wire a single message is a stream of one. As a stream, a request is not received
    # before the call's guard has let the caller in, and a response is sent within the guard.
    return grpc.stream_stream_rpc_method_handler(
        guarded,
        # A single request stays bytes, as gRPC would parse it on the event loop.
        request_deserializer=deserialize if handler.request_streaming else None,
        response_serializer=handler.response_serializer,
    )


def _guard_unary(
    function: Method, guard: Guard, first_message_timeout_s: float, deserialize: Deserialize
) -> Any:
    async def guarded(requests: AsyncIterator[bytes], context: Context) -> None:
        async with guard(context) as call:
            data = await _first(requests, first_message_timeout_s)
            call.on_request()
            request = await _parsed(data, deserialize)
            del data
            call.info.request_id = request_id_of(request)
            _note_trace(call.info, request)
            await function(request, call.context)

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
    async def guarded(requests: AsyncIterator[Any], context: Context) -> None:
        async with guard(context) as call:
            call.on_request()  # as they come while the call runs
            await function(requests, call.context)

    return guarded


def _writing(function: Any, *, streams: bool) -> Method:
    """Turns a servicer's method into a coroutine function that writes its responses."""

    async def write_all(request: Any, context: CallContext) -> None:
        async with aclosing(function(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    async def write_one(request: Any, context: CallContext) -> None:
        await context.write(await function(request, context))

    if not streams:
        return write_one
    # A coroutine function of a stream writes the responses itself.
    return write_all if inspect.isasyncgenfunction(function) else function


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
