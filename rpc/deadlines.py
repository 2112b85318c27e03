"""Deadlines of calls, seen from the server. Every call has one."""

import time
from typing import Any

import grpc

from baton.errors import DeadlineExceededError

__all__ = ["DEFAULT_TIMEOUT_S", "deadline_of", "remaining_s"]

DEFAULT_TIMEOUT_S = 600.0


def remaining_s(
    context: grpc.aio.ServicerContext[Any, Any], default_s: float = DEFAULT_TIMEOUT_S
) -> float:
    """Seconds left for a call: the caller's, but never more than `default_s`.

    Raises:
        DeadlineExceededError: none are left.
    """
    remaining = context.time_remaining()
    if remaining is None:
        return default_s
    if remaining <= 0:
        raise DeadlineExceededError("the call's deadline has passed")
    return min(remaining, default_s)


def deadline_of(
    context: grpc.aio.ServicerContext[Any, Any], default_s: float = DEFAULT_TIMEOUT_S
) -> float:
    """The `time.monotonic()` at which a call must have ended.

    Raises:
        DeadlineExceededError: it has passed.
    """
    return time.monotonic() + remaining_s(context, default_s)
