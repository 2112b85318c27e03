"""`Call`: one call of a server, how it ends, and its log line."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

import grpc

from baton.common.errors import BatonError
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from rpc.call_context import CallContext, Context
from rpc.errors import abort_with, status_of_number
from rpc.logs import CallInfo, log_fields

__all__ = ["QUIET_METHODS", "Call"]

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
    # `baton top` asks every two seconds.
    "/baton.v1.ClusterService/GetCluster",
)
_METHODS_OF_REQUESTS = "/baton.v1.PrefillService/"
"""Routers call them for each request, of which they write a line themselves."""
_MAX_STATUS_WAIT_S = 1.0
_ROUNDED_SHARE = 0.02
"""gRPC sends a deadline with two digits at least, rounded up: clients end their calls earlier."""


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
        self.info = CallInfo(trace=_parse_trace(context))
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
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent" and isinstance(value, str):
            return parse_traceparent(value)
    return None


def _number(code: Any) -> int:
    """The number of a status. `context.code()` may be a number, a StatusCode or None."""
    return code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
