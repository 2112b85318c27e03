"""`anthropic_error`: errors in the shape of Anthropic's API."""

from typing import Any, Literal

from pydantic import BaseModel

from baton.common.errors import InvalidArgumentError, PromptTooLongError
from router.http.errors import Problem

__all__ = ["AnthropicErrorResponse", "ThreadUnsupportedError", "anthropic_error"]

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ThreadUnsupportedError(InvalidArgumentError):
    """The request wants the server to keep the conversation. Anthropic's client knows the details
    of this error, and then sends the whole conversation.
    """


class AnthropicErrorInfo(BaseModel):
    """The type and the message of an error."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """An error in the shape of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str | None


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """The body that Anthropic's API has; in a stream, the event `error`."""
    otherwise = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _KINDS.get(problem.status, otherwise)
    return {
        "type": "error",
        "error": {"type": kind, "message": _message_of(problem), **_details_of(problem)},
        "request_id": problem.request_id or None,
    }


def _message_of(problem: Problem) -> str:
    """The message; that of a prompt without room has the text of Anthropic's API, which clients
    that shorten a conversation look for.
    """
    error = problem.cause
    if not isinstance(error, PromptTooLongError):
        return problem.message
    most = error.max_total_tokens - 1
    return f"prompt is too long: {error.num_tokens} tokens > {most} maximum ({error.message})"


def _details_of(problem: Problem) -> dict[str, Any]:
    if not isinstance(problem.cause, ThreadUnsupportedError):
        return {}
    return {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
