"""`Call`: one call of a server, how it ends, and its log line. `CallContext`: its writes."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import grpc

from baton.common.errors import BatonError, DeadlineExceededError, Reason
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from rpc.call_sessions import session_from
from rpc.errors import abort_with, status_of_number
from rpc.logs import CallInfo, log_fields

__all__ = ["QUIET_METHODS", "Call", "CallContext", "Context"]

_MAX_JOINED_BYTES = 1024
"""Of a first message that is sent together with the metadata before it, which is faster."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]
_LOGGER = logging.getLogger("baton.rpc")
QUIET_METHODS = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.",
    # Routers ask now and then, and follow the load and the cache.
    "/baton.v1.WorkerService/GetLoad",
    "/baton.v1.WorkerService/GetInfo",
    "/baton.v1.WorkerService/WatchLoad",
    "/baton.v1.WorkerService/WatchKvEvents",
    "/baton.v1.ReplicaSetService/WatchReplicas",
    # Processes of a router ask each other when they are asked.
    "/baton.v1.RouterProcessService/",
    "/baton.v1.RouterMetricsService/",
    # Workers renew their announcements every few seconds.
    "/baton.v1.RegistrationService/",
    # `baton top` asks every two seconds.
    "/baton.v1.ClusterService/GetCluster",
)
_METHODS_OF_REQUESTS = "/baton.v1.PrefillService/"
"""Routers call them for each request, of which they write a line themselves."""
_MAX_STATUS_WAIT_S = 1.0
_ROUNDED_SHARE = 0.02
"""gRPC sends a deadline with two digits at least, rounded up: clients end their calls earlier."""


class CallContext:
    """The context of a call, with a time limit on writes that the client does not read.

    A write waits while the client reads none of the messages before it. All other methods are
    those of grpc.aio's context.

    Args:
        context: of grpc.aio.
        send_timeout_s: the longest wait of a write; None for no limit.

    Attributes:
        is_unread: whether a write has waited for too long.
        is_over: whether a write has failed, as the client has left.
    """

    def __init__(self, context: Context, send_timeout_s: float | None) -> None:
        self._context = context
        self._metadata = context.invocation_metadata() or ()
        self._timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[Any] | None = None
        self._writes_since = 0.0
        self.is_unread = self.is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Metadata:
        """The caller's metadata, of which grpc.aio would make a copy for each reader."""
        return self._metadata

    async def write(self, message: Any) -> None:
        """Sends a message.

        Raises:
            DeadlineExceededError: the client has read nothing for `send_timeout_s`.
            CancelledError: the client has left.
        """
        self._writing, self._writes_since = asyncio.current_task(), self._loop.time()
        try:
            if self._timer is None and self._timeout_s is not None:
                await self._begin(message, self._timeout_s)
            await self._context.write(message)
        except grpc.aio.InternalError:
            # The call is over. grpc.aio cancels its task then, but perhaps not before this error.
            self.is_over = True
            raise asyncio.CancelledError from None
        except asyncio.CancelledError:
            if self.is_unread and self._writing is not None:
                self._writing.uncancel()
                raise DeadlineExceededError(
                    f"the client has read nothing for {self._timeout_s:g} s (--send-timeout-s)",
                    reason=Reason.ANSWER_NOT_READ,
                ) from None
            raise
        finally:
            self._writing = None

    async def _begin(self, message: Any, timeout_s: float) -> None:
        """Called before the first message."""
        self._timer = self._loop.call_later(timeout_s, self._check, timeout_s)
        if message.ByteSize() > _MAX_JOINED_BYTES:
            # If the client did not read the message, its call could have no status: grpc.aio would
            # send the metadata before the message once more.
            await self._context.send_initial_metadata(())

    def close(self) -> None:
        """Called when the call has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self, timeout_s: float) -> None:
        """Ends a write that waits for too long. One timer serves all messages of a call."""
        now = self._loop.time()
        waiting_since = now if self._writing is None else self._writes_since
        left_s = waiting_since + timeout_s - now
        if left_s > 0 or self._writing is None:
            self._timer = self._loop.call_later(left_s, self._check, timeout_s)
        else:
            self.is_unread = True
            self._writing.cancel()


class Call:
    """One call, made in its task.

    Args:
        method: its full name.
        context: what its servicer gets.

    Attributes:
        method: its full name.
        context: what its servicer gets.
        info: what is known of it.
        status: with which it has ended; None if grpc.aio knows it.
        ending: the error with which the server ends it; None while it does not.
        on_request: called when its request has come.
    """

    def __init__(self, method: str, context: CallContext) -> None:
        self.method = method
        self.context = context
        session = session_from(context.invocation_metadata())
        self.info = CallInfo(trace=_parse_trace(context), session=session)
        self.status: grpc.StatusCode | None = None
        self.ending: BatonError | None = None
        self.on_request: Callable[[], object] = _nothing
        self._task = asyncio.current_task()

    def end(self, error: BatonError) -> None:
        """Ends the call's method, and the call with this error."""
        self.ending = error
        if self._task is not None:
            self._task.cancel()

    @property
    def has_been_left(self) -> bool:
        """Whether the client has ended it: a write has failed, or grpc.aio cancels its task."""
        is_cancelled = self._task is not None and self._task.cancelling() > 0
        return is_cancelled or self.context.is_over

    @property
    def code(self) -> str:
        """The name of its status, once it has ended."""
        return (self.status or status_of_number(_number(self.context.code()))).name

    async def abort(self, error: BatonError) -> NoReturn:
        """Ends the call with an error.

        The client gets the status behind the messages that were sent before it. If it does not
        read them, the status waits for as long as the connection lasts, but the call does not.

        Raises:
            AbortError: the status is sent.
            CancelledError: the client has left, or does not read.
        """
        self.status = grpc.StatusCode[error.code]
        try:
            async with asyncio.timeout(_MAX_STATUS_WAIT_S):
                await abort_with(cast("Context", self.context), error)
        except TimeoutError:
            pass
        except grpc.aio.InternalError:
            if not self.context.is_unread:
                self.note_client_left()
        raise asyncio.CancelledError

    def note_client_left(self) -> None:
        """Sets the status of a call whose client has ended it: cancelled, or at its deadline."""
        self.status = grpc.StatusCode.CANCELLED
        remaining_s = self.context.time_remaining()
        if remaining_s is not None:
            total_s = time.monotonic() - self.info.started_at + remaining_s
            if remaining_s <= _ROUNDED_SHARE * total_s:
                self.status = grpc.StatusCode.DEADLINE_EXCEEDED

    def log(self) -> None:
        """Writes the line of the call, which has ended."""
        code = self.code
        is_quiet = code == "OK" and self.method.startswith(_METHODS_OF_REQUESTS)
        is_quiet = is_quiet or self.method.startswith(QUIET_METHODS)
        level = logging.DEBUG if is_quiet else logging.INFO
        if not _LOGGER.isEnabledFor(level):
            return
        duration_ms = round((time.monotonic() - self.info.started_at) * 1000, 1)
        peer, request_id = self.context.peer(), self.info.request_id
        _LOGGER.log(
            level,
            "call method=%s code=%s duration_ms=%.1f peer=%s request_id=%s",
            *(self.method, code, duration_ms, peer, ascii(request_id)),
            extra=log_fields(method=self.method, code=code, duration_ms=duration_ms, peer=peer),
        )


def _nothing() -> None:
    pass


def _parse_trace(context: CallContext) -> TraceContext | None:
    """The caller's span, from the call's metadata."""
    for name, value in context.invocation_metadata():
        if name == "traceparent" and isinstance(value, str):
            return parse_traceparent(value)
    return None


def _number(code: Any) -> int:
    """The number of a status. `context.code()` may be a number, a StatusCode or None."""
    return code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
