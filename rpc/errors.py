"""Baton's errors on the wire and back.

BatonError  <->  gRPC status           between any client and server
BatonError  <->  baton.v1.WorkerError  of one request in a DecodeService.Connect stream

A status' message is short: some proxies take 4 KiB of trailers, and the details repeat it.

grpc-status-details-bin   a google.rpc.Status with ErrorInfo, and BadRequest and RetryInfo if the
                          error has a field and a time of retry
grpc-retry-pushback-ms    when a library with a retry policy calls again; negative: it does not
retry-after-ms            the same time, for programs that have no library for it

`google.rpc` is imported when the first error is sent or received: most processes meet none.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast
from urllib.parse import quote_from_bytes

import grpc
from google.protobuf.message import DecodeError

from baton.common.errors import (
    AbortedError,
    AlreadyExistsError,
    BatonError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    Reason,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.common.short_texts import cut_bytes, short_name
from baton.v1 import request_pb2

__all__ = [
    "DOMAIN",
    "MAX_MESSAGE_BYTES",
    "abort_with",
    "from_rpc_error",
    "from_worker_error",
    "status_of_number",
    "to_status",
    "to_worker_error",
    "trailers_of",
]

DOMAIN = "baton.v1"
"""`ErrorInfo.domain`: whose reasons they are."""
_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"
_RETRY_AFTER = "retry-after-ms"
_MAX_DESCRIPTION_BYTES = 256
_NO_RETRY = "-1"
_NEVER_RETRIED = frozenset({"ABORTED", "DEADLINE_EXCEEDED", "INTERNAL", Reason.ANSWER_TOO_LARGE})
"""Codes and reasons of errors after which a retry would take the time up to the deadline again,
lose further replicas, or meet the same bug or limit.
"""

_Trailers = tuple[tuple[str, str | bytes], ...]
MAX_MESSAGE_BYTES = 1200
"""The most bytes of a status' message on the wire, where a byte that is not printable ASCII takes
three.
"""
_ERRORS: tuple[type[BatonError], ...] = (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
_ERROR_BY_STATUS = {grpc.StatusCode[error.code]: error for error in _ERRORS}
_STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {
    status.value[0]: status for status in grpc.StatusCode
}
_PRINTABLE = bytes(set(range(0x20, 0x7F)) - {ord("%")})
"""The bytes of a message that gRPC sends as they are; it writes the others as %XX."""


def trailers_of(error: BatonError, status: grpc.StatusCode, message: str) -> _Trailers:
    """The metadata that follows a status.

    Args:
        error: the error.
        status: its status.
        message: the status' message. Libraries compare it with that of the details.
    """
    trailers: list[tuple[str, str | bytes]] = [(_DETAILS, _details(error, status, message))]
    if error.retry_after_s is not None:
        milliseconds = str(_retry_after_ms(error.retry_after_s))
        trailers += [(_RETRY_AFTER, milliseconds), (_PUSHBACK, milliseconds)]
    elif not _NEVER_RETRIED.isdisjoint((error.code, error.reason)):
        trailers.append((_PUSHBACK, _NO_RETRY))
    return tuple(trailers)


def _apply_trailers(error: BatonError, trailers: Iterable[tuple[str, str | bytes]]) -> None:
    """Sets reason, field and time of retry of an error to those in a call's trailers.

    Args:
        error: the error of the call's status.
        trailers: those of any server, which may have none of these.
    """
    for name, value in trailers:
        if name == _RETRY_AFTER and isinstance(value, str) and value.isdecimal():
            error.retry_after_s = int(value) / 1000
        elif name == _DETAILS and isinstance(value, bytes):
            with suppress(DecodeError):  # the server may have details of another form
                _apply_details(error, value)


def _retry_after_ms(retry_after_s: float) -> int:
    return math.ceil(retry_after_s * 1000)


def _details(error: BatonError, status: grpc.StatusCode, message: str) -> bytes:
    from google.rpc import error_details_pb2, status_pb2

    details = status_pb2.Status(code=status.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    details.details.add().Pack(info)
    if error.field is not None:
        request = error_details_pb2.BadRequest()
        description = cut_bytes(message, _MAX_DESCRIPTION_BYTES)
        request.field_violations.add(field=short_name(error.field), description=description)
        details.details.add().Pack(request)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(_retry_after_ms(error.retry_after_s))
        details.details.add().Pack(retry)
    return bytes(details.SerializeToString())


def _apply_details(error: BatonError, data: bytes) -> None:
    from google.rpc import error_details_pb2, status_pb2

    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(data).details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            error.reason = info.reason
        elif detail.Unpack(request) and request.field_violations:
            error.field = request.field_violations[0].field


def status_of_number(number: int) -> grpc.StatusCode:
    """The status with a canonical code number; UNKNOWN for any other number."""
    return _STATUS_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def to_status(error: BatonError) -> tuple[grpc.StatusCode, str]:
    """The status and the message that a caller receives for `error`; a long message is cut."""
    message = cut_bytes(error.message, MAX_MESSAGE_BYTES)
    if len(quote_from_bytes(message.encode(), safe=_PRINTABLE)) > MAX_MESSAGE_BYTES:
        message = cut_bytes(message, MAX_MESSAGE_BYTES // 3)
    return grpc.StatusCode[error.code], message


async def abort_with(context: Any, error: BatonError) -> None:
    """Ends a call with the status and the details of an error.

    Args:
        context: the call's, of grpc.aio or one that has its methods.
        error: the error.
    """
    status, message = to_status(error)
    await context.abort(status, message, trailing_metadata=trailers_of(error, status, message))


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """The error that a failed call of grpc or grpc.aio stands for, with its message."""
    call = cast("grpc.Call", error)  # grpc raises objects that are both; its types do not say so
    known = _error_from_status(call.code(), call.details() or "")
    _apply_trailers(known, call.trailing_metadata() or ())
    return known


def to_worker_error(error: BatonError) -> request_pb2.WorkerError:
    """The message for the failure of one request in a Connect stream."""
    status, message = to_status(error)
    wire = request_pb2.WorkerError(
        code=status.value[0], message=message, reason=error.reason, field=error.field or ""
    )
    if error.retry_after_s is not None:
        wire.retry_after_ms = math.ceil(error.retry_after_s * 1000)
    return wire


def from_worker_error(error: request_pb2.WorkerError) -> BatonError:
    """The error that such a message stands for."""
    known = _error_from_status(status_of_number(error.code), error.message)
    known.reason = error.reason or known.reason
    known.field = error.field or known.field
    if error.HasField("retry_after_ms"):
        known.retry_after_s = error.retry_after_ms / 1000
    return known


def _error_from_status(status: grpc.StatusCode, message: str) -> BatonError:
    """The error of a status. Statuses that Baton never sends (UNIMPLEMENTED, UNKNOWN ...) are
    bugs and become `InternalError`.
    """
    known = _ERROR_BY_STATUS.get(status)
    if known is None:
        return InternalError(f"{status.name}: {message}")
    return known(message or status.name)
