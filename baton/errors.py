"""The errors that Baton raises on purpose. A public path of `baton.common.errors`."""

from baton.common.errors import (
    AbortedError,
    AlreadyExistsError,
    BatonError,
    ConfigurationError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)

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
    "RequestCancelledError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
]
