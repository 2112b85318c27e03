"""Every error Baton raises on purpose, in one tree.

    BatonError
    ├── InvalidArgumentError      a field is out of range
    │   └── PromptTooLongError    the prompt leaves no room for a generated token
    ├── FailedPreconditionError   tiers do not match, or a feature is unsupported
    ├── NotFoundError             the model or object is unknown
    ├── AlreadyExistsError        a running request has this id
    ├── ResourceExhaustedError    a queue is full, or a limit is reached
    ├── DeadlineExceededError     the caller's deadline passed
    ├── RequestCancelledError     the caller cancelled or left
    ├── UnavailableError          no replica can take the request now; safe to retry
    ├── AbortedError              ended from outside; retry the whole request
    ├── UnauthenticatedError      the caller has no valid credential
    ├── PermissionDeniedError     the caller may not do this
    ├── InternalError             a bug; the text does not contain the cause
    └── ConfigurationError        at start-up: a flag, a checkpoint, a URL

A leaf module: every package may import it, and it imports little but the standard
library. `code` is the name of the gRPC status; `rpc.errors` converts errors. Their table is in
protos/baton/v1/generation.proto.
"""

import re
from copy import copy
from enum import StrEnum
from typing import Any, ClassVar, Self

from baton.common.short_texts import short_repr

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "BatonError",
    "ConfigurationError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "PromptTooLongError",
    "Reason",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
]

_FIELD = re.compile(
    r"(?:prompts\[\d+\]: )?([a-z_][a-z0-9_]*(?:\[\d+\]|\.[A-Za-z_][A-Za-z0-9_]*)*)[ :]"
)
"""A field's name, with which messages about a field begin, after the place that `within` adds."""
_WORDS = frozenset(
    (
        *("a", "an", "another", "cannot", "each", "every", "exactly", "internal", "it", "no"),
        *("number", "one", "the", "this", "to"),
    )
)
"""Other words with which messages begin."""


class Reason(StrEnum):
    """Why a call was refused, where the status alone does not say it; each names one row of the
    table in generation.proto. Their texts are stable: programs compare them.
    """

    ANSWER_NOT_READ = "ANSWER_NOT_READ"
    ANSWER_TOO_LARGE = "ANSWER_TOO_LARGE"
    CALLS_FULL = "CALLS_FULL"
    CLIENT_CONCURRENCY = "CLIENT_CONCURRENCY"
    CLIENT_RATE = "CLIENT_RATE"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    NOT_CONFIGURED = "NOT_CONFIGURED"
    NOT_RESUMED = "NOT_RESUMED"
    NO_REPLICA_FITS = "NO_REPLICA_FITS"
    NO_REPLICA_READY = "NO_REPLICA_READY"
    OVERLOADED = "OVERLOADED"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    REPLICAS_FULL = "REPLICAS_FULL"
    REPLICAS_LOST = "REPLICAS_LOST"
    REQUEST_DEADLINE = "REQUEST_DEADLINE"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    REQUEST_NOT_RECEIVED = "REQUEST_NOT_RECEIVED"
    ROUTER_DEADLINE = "ROUTER_DEADLINE"
    ROUTER_FULL = "ROUTER_FULL"
    SERVER_STARTING = "SERVER_STARTING"
    SERVER_STOPPING = "SERVER_STOPPING"
    SLO_TPOT = "SLO_TPOT"
    SLO_TTFT = "SLO_TTFT"
    UNKNOWN_FIELD = "UNKNOWN_FIELD"


class BatonError(Exception):
    """Base of the tree. `message` may be shown to the caller.

    Args:
        message: what is wrong.
        retry_after_s: see below.
        reason: see below; None for the class's.
        field: see below; None: errors of classes with `names_field` have the field with whose name
            the message begins.

    Attributes:
        message: what is wrong.
        retry_after_s: seconds after which the same call may succeed; None if that is not known.
        reason: stable and for programs: a `Reason`, or the status' name if there is nothing more
            exact.
        field: the field of the request that is wrong, as the message names it; None if it is not
            about one.
    """

    code: ClassVar[str] = "UNKNOWN"
    default_reason: ClassVar[Reason | None] = None
    names_field: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        retry_after_s: float | None = None,
        *,
        reason: str | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.reason: str = reason or self.default_reason or self.code
        self.field = _leading_field(message) if field is None and self.names_field else field

    def within(self, place: str) -> Self:
        """The same error with a message that names the part of the request that it is about."""
        twin = copy(self)
        twin.message = f"{place}: {self.message}"
        twin.args = (twin.message,)
        return twin


def _leading_field(message: str) -> str | None:
    """The field with whose name a message begins; None if it begins otherwise."""
    match = _FIELD.match(message)
    return None if match is None or match[1] in _WORDS else match[1]


class InvalidArgumentError(BatonError):
    """A field of a request is out of range; names the field, its value and the limit."""

    code = "INVALID_ARGUMENT"
    names_field = True

    @classmethod
    def for_field(cls, field: str, value: Any, limit: str) -> "InvalidArgumentError":
        """The standard wording: `top_p is 1.5; it must be in (0, 1]`. Long values are cut."""
        return cls(f"{field} is {short_repr(value)}; it must be {limit}")


class PromptTooLongError(InvalidArgumentError):
    """The prompt leaves no room for a generated token.

    Attributes:
        num_tokens: tokens of the prompt; if only its characters were counted, as many as it has
            at least.
        max_total_tokens: the most tokens of a prompt and its completion together.
    """

    default_reason = Reason.PROMPT_TOO_LONG

    def __init__(self, message: str, *, num_tokens: int = 0, max_total_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_total_tokens = max_total_tokens


class FailedPreconditionError(BatonError):
    """The tiers do not match, or a feature is unsupported; a retry does not help."""

    code = "FAILED_PRECONDITION"
    names_field = True


class NotFoundError(BatonError):
    """The model or object is unknown."""

    code = "NOT_FOUND"


class AlreadyExistsError(BatonError):
    """A running request has the same id; the field is right, and may be used again later."""

    code = "ALREADY_EXISTS"
    default_reason = Reason.REQUEST_ID_IN_USE

    @classmethod
    def for_request_id(cls, request_id: str) -> "AlreadyExistsError":
        """The error of a request whose id another one has."""
        shown = short_repr(request_id)
        message = f"request_id is {shown}; it must be unique among running requests"
        return cls(message, field="request_id")


class ResourceExhaustedError(BatonError):
    """A queue is full, a limit is reached, or the request can never fit."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(BatonError):
    """The request's deadline passed."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(BatonError):
    """The caller cancelled the request."""

    code = "CANCELLED"


class UnavailableError(BatonError):
    """No replica can take the request now; safe to retry."""

    code = "UNAVAILABLE"


class AbortedError(BatonError):
    """The request was ended from outside; retry it as a whole."""

    code = "ABORTED"


class UnauthenticatedError(BatonError):
    """The caller has no valid credential. The message does not say which part was wrong."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(BatonError):
    """The caller is known, and may not do this."""

    code = "PERMISSION_DENIED"


class InternalError(BatonError):
    """A bug. The cause is in the log with the request's id; the caller does not get it."""

    code = "INTERNAL"


class ConfigurationError(BatonError):
    """The process cannot start: a flag, a checkpoint folder or a URL is wrong."""

    code = "FAILED_PRECONDITION"
