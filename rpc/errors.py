"""Baton's errors on the wire and back.

BatonError  <->  gRPC status           between any client and server
BatonError  <->  baton.v1.WorkerError  of one request in a DecodeService.Connect stream

A status' message is short: some proxies take 4 KiB of trailers, and the details repeat it.
"""

import math
from typing import Any, cast
from urllib.parse import quote_from_bytes

import grpc

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
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.common.short_texts import cut_bytes
from baton.v1 import request_pb2
from rpc.error_details import apply_trailers, trailers_of

__all__ = [
    "MAX_MESSAGE_BYTES",
    "abort_with",
    "from_rpc_error",
    "from_worker_error",
    "status_of_number",
    "to_status",
    "to_worker_error",
]

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
    apply_trailers(known, call.trailing_metadata() or ())
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
