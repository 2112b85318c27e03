"""Every error Baton raises on purpose, in one tree.

    BatonError
    ├── InvalidArgumentError      a field is out of range
    │   └── PromptTooLongError    the prompt leaves no room for a generated token
    ├── FailedPreconditionError   tiers do not match, or a feature is unsupported
    ├── NotFoundError             the model or object is unknown
    ├── ResourceExhaustedError    a queue is full, or a limit is reached
    ├── DeadlineExceededError     the caller's deadline passed
    ├── RequestCancelledError     the caller cancelled or left
    ├── UnavailableError          no replica can take the request now; safe to retry
    ├── AbortedError              ended from outside; retry the whole request
    ├── UnauthenticatedError      the caller has no valid credential
    ├── PermissionDeniedError     the caller may not do this
    ├── InternalError             a bug; the text does not contain the cause
    └── ConfigurationError        at start-up: a flag, a checkpoint, a URL

A leaf module: every package may import it, and it imports only the standard
library. `code` is the name of the gRPC status; `rpc.errors` converts errors.
"""

from copy import copy
from typing import Any, ClassVar, Self

__all__ = [
    "AbortedError",
    "BatonError",
    "ConfigurationError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "PromptTooLongError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
]


class BatonError(Exception):
    """Base of the tree. `message` may be shown to the caller.

    Attributes:
        retry_after_s: seconds after which the same call may succeed; None if that is not known.
    """

    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def within(self, place: str) -> Self:
        """The same error with a message that names the part of the request that it is about."""
        twin = copy(self)
        twin.message = f"{place}: {self.message}"
        twin.args = (twin.message,)
        return twin


class InvalidArgumentError(BatonError):
    """A field of a request is out of range; names the field, its value and the limit."""

    code = "INVALID_ARGUMENT"

    @classmethod
    def for_field(cls, field: str, value: Any, limit: str) -> "InvalidArgumentError":
        """The standard wording: `top_p is 1.5; it must be in (0, 1]`."""
        return cls(f"{field} is {value!r}; it must be {limit}")


class PromptTooLongError(InvalidArgumentError):
    """The prompt leaves no room for a generated token.

    Attributes:
        num_tokens: tokens of the prompt; if only its characters were counted, as many as it has
            at least.
        max_total_tokens: the most tokens of a prompt and its completion together.
    """

    def __init__(self, message: str, *, num_tokens: int = 0, max_total_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_total_tokens = max_total_tokens


class FailedPreconditionError(BatonError):
    """The tiers do not match, or a feature is unsupported; a retry does not help."""

    code = "FAILED_PRECONDITION"


class NotFoundError(BatonError):
    """The model or object is unknown."""

    code = "NOT_FOUND"


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
