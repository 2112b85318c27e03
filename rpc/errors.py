"""Baton's errors on the wire and back.

BatonError  <->  gRPC status           between any client and server
BatonError  <->  baton.v1.WorkerError  of one request in a DecodeService.Connect stream
"""

import math
from typing import cast

import grpc

from baton.errors import (
    AbortedError,
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
from baton.v1 import request_pb2

__all__ = [
    "from_rpc_error",
    "from_worker_error",
    "status_of_number",
    "to_status",
    "to_trailers",
    "to_worker_error",
]

_MOST_MESSAGE_BYTES = 6000
"""gRPC takes 8 KiB of trailers, where a byte that is not ASCII takes three."""
_RETRY_AFTER = "retry-after-ms"
_ERRORS: tuple[type[BatonError], ...] = (
    AbortedError,
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


def status_of_number(number: int) -> grpc.StatusCode:
    """The status with a canonical code number; UNKNOWN for any other number."""
    return _STATUS_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def to_status(error: BatonError) -> tuple[grpc.StatusCode, str]:
    """The status and the message that a caller receives for `error`.

    The message is cut to what fits into the trailers of a call. A lone surrogate, which a client's
    JSON may have, is written as a question mark.
    """
    text = error.message.encode(errors="replace")
    most_bytes = _MOST_MESSAGE_BYTES if text.isascii() else _MOST_MESSAGE_BYTES // 3
    return grpc.StatusCode[error.code], text[:most_bytes].decode(errors="ignore")


def to_trailers(error: BatonError) -> tuple[tuple[str, str], ...]:
    """The metadata that follows the status of `error`."""
    if error.retry_after_s is None:
        return ()
    return ((_RETRY_AFTER, str(math.ceil(error.retry_after_s * 1000))),)


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """The error that a failed call of grpc or grpc.aio stands for, with its message."""
    call = cast("grpc.Call", error)  # grpc raises objects that are both; its types do not say so
    known = _error_of(call.code(), call.details() or "")
    for name, value in call.trailing_metadata() or ():
        if name == _RETRY_AFTER and isinstance(value, str) and value.isdecimal():
            known.retry_after_s = int(value) / 1000
    return known


def to_worker_error(error: BatonError) -> request_pb2.WorkerError:
    """The message for the failure of one request in a Connect stream."""
    status, message = to_status(error)
    return request_pb2.WorkerError(code=status.value[0], message=message)


def from_worker_error(error: request_pb2.WorkerError) -> BatonError:
    """The error that such a message stands for."""
    return _error_of(status_of_number(error.code), error.message)


def _error_of(status: grpc.StatusCode, message: str) -> BatonError:
    """The error of a status. Statuses that Baton never sends (UNIMPLEMENTED, UNKNOWN ...) are
    bugs and become `InternalError`.
    """
    known = _ERROR_BY_STATUS.get(status)
    if known is None:
        return InternalError(f"{status.name}: {message}")
    return known(message or status.name)
