"""The details of an error in the trailers of a call, as libraries of all languages read them.

grpc-status-details-bin   a google.rpc.Status with ErrorInfo, and BadRequest and RetryInfo if the
                          error has a field and a time of retry
grpc-retry-pushback-ms    when a library with a retry policy calls again; negative: it does not
retry-after-ms            the same time, for programs that have no library for it

`google.rpc` is imported when the first error is sent or received: most processes meet none.
"""

import math
from collections.abc import Iterable
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from baton.common.errors import BatonError
from baton.common.reasons import Reason
from baton.common.short_texts import cut_bytes, short_name

__all__ = ["DOMAIN", "Trailers", "apply_trailers", "trailers_of"]

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

Trailers = tuple[tuple[str, str | bytes], ...]


def trailers_of(error: BatonError, status: grpc.StatusCode, message: str) -> Trailers:
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


def apply_trailers(error: BatonError, trailers: Iterable[tuple[str, str | bytes]]) -> None:
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
