"""Errors as HTTP answers, in the shapes of OpenAI's and of Anthropic's API.

Every error becomes a `Problem`: a status and the parts of a body. The body's shape depends on
the protocol: `openai_error` or `anthropic_error`. The cause of a bug is logged
with the request's id; the client gets the id alone.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.common.errors import BatonError, InvalidArgumentError, PromptTooLongError, Reason
from baton.common.short_texts import cut_bytes, short_repr
from router.http.json_bytes import json_response

__all__ = [
    "AnthropicErrorResponse",
    "ErrorBody",
    "Problem",
    "ThreadUnsupportedError",
    "anthropic_error",
    "error_response",
    "http_problem",
    "openai_error",
    "problem_of",
]

_LOGGER = logging.getLogger("baton.http")

INVALID_REQUEST = "invalid_request_error"
_RETRY_AFTER_S = "1"
_MAX_MESSAGE_BYTES = 2000
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_OF_CODE: Mapping[str, tuple[int, str, str | None]] = {
    "INVALID_ARGUMENT": (400, INVALID_REQUEST, None),
    "FAILED_PRECONDITION": (400, INVALID_REQUEST, None),
    "UNAUTHENTICATED": (401, INVALID_REQUEST, "invalid_api_key"),
    "PERMISSION_DENIED": (403, "permission_error", "permission_denied"),
    "NOT_FOUND": (404, INVALID_REQUEST, "model_not_found"),
    "ALREADY_EXISTS": (409, INVALID_REQUEST, "request_id_in_use"),
    "RESOURCE_EXHAUSTED": (503, "server_error", "overloaded"),
    "UNAVAILABLE": (503, "server_error", "service_unavailable"),
    "ABORTED": (503, "server_error", "aborted"),
    "DEADLINE_EXCEEDED": (504, "timeout_error", "deadline_exceeded"),
    "CANCELLED": (499, INVALID_REQUEST, "cancelled"),
}
"""Status, type and code by the code of a `BatonError`; the other codes are bugs."""
_OF_CLIENTS_LIMIT = (429, "rate_limit_error", "rate_limit_exceeded")
_CLIENTS_LIMITS = frozenset(
    {Reason.CLIENT_RATE, Reason.CLIENT_CONCURRENCY, Reason.ANSWER_TOO_LARGE}
)
"""Reasons of RESOURCE_EXHAUSTED that concern one client, whoever else calls. The others are limits
of this cluster: another one may take the request.
"""
_REASON_HEADER = "x-baton-reason"
_OF_STATUS: Mapping[int, tuple[str, str | None]] = {
    404: ("there is no such path", "unknown_url"),
    405: ("the path does not allow this method", "method_not_supported"),
}
_RETRY: Mapping[str, str] = MappingProxyType({"Retry-After": _RETRY_AFTER_S})
# The official clients would send the request twice more: each time up to its deadline, to lose
# further replicas, or to meet the same bug or the same running request.
_NO_RETRY: Mapping[str, str] = MappingProxyType({"x-should-retry": "false"})
_HEADERS: Mapping[str, Mapping[str, str]] = {
    "UNAUTHENTICATED": MappingProxyType({"WWW-Authenticate": "Bearer"}),
    "RESOURCE_EXHAUSTED": _RETRY,
    "UNAVAILABLE": _RETRY,
    "ABORTED": _NO_RETRY,
    "ALREADY_EXISTS": _NO_RETRY,
    "DEADLINE_EXCEEDED": _NO_RETRY,
}
"""By the code of a `BatonError`."""
_PROMPT_INDEX = re.compile(r"^prompts\[\d+\]\.")
_BODY_FIELDS = {"text": "prompt", "token_ids": "prompt", "prompts": "prompt", "chat": "messages"}
"""Fields of the body by those of the pipeline's message that hold them."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request failed.

    Attributes:
        status: of the HTTP answer.
        message: may be shown to the client.
        kind: OpenAI's `type` of the error.
        param: the field of the request that is wrong.
        code: OpenAI's `code` of the error.
        headers: further headers of the answer.
        request_id: of the request; empty if the request was refused before it was read.
        cause: the error that the problem was made of, for protocols that show more of it.
    """

    status: int
    message: str
    kind: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str = ""
    cause: BatonError | None = None


ErrorBody = Callable[[Problem], dict[str, Any]]
"""Makes the JSON body of an answer with an error, as a protocol wants it."""


def openai_error(problem: Problem) -> dict[str, Any]:
    """The body that OpenAI's API has."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.kind,
            "param": problem.param,
            "code": problem.code,
        }
    }


def error_response(problem: Problem, error_body: ErrorBody) -> Response:
    """The response to a request that failed, in the shape of its protocol."""
    return json_response(error_body(problem), problem.status, problem.headers)


def problem_of(error: BaseException, request_id: str) -> Problem:
    """The problem that an exception stands for. A bug is logged, with its cause.

    Args:
        error: what was raised.
        request_id: of the request that failed.
    """
    problem = _problem_of(error, request_id)
    message = cut_bytes(problem.message, _MAX_MESSAGE_BYTES)
    return replace(problem, message=message, request_id=request_id)


def _problem_of(error: BaseException, request_id: str) -> Problem:
    match error:
        case BatonError() if error.code in _OF_CODE:
            return _of_baton_error(error)
        case RequestValidationError():
            return _of_validation_error(error)
        case HTTPException():
            return http_problem(error.status_code, str(error.detail), dict(error.headers or {}))
    _LOGGER.error("failed request_id=%s", ascii(request_id), exc_info=error)
    return Problem(
        status=500,
        message=f"internal error; request_id={request_id}",
        kind="server_error",
        headers=_NO_RETRY,
    )


def http_problem(status: int, message: str, headers: Mapping[str, str] = _NO_HEADERS) -> Problem:
    """The problem of an answer without a `BatonError`; well-known statuses have their own text."""
    known, code = _OF_STATUS.get(status, (message, None))
    kind = INVALID_REQUEST if status < 500 else "server_error"
    return Problem(status=status, message=known, kind=kind, code=code, headers=headers)


def _of_baton_error(error: BatonError) -> Problem:
    is_clients = error.reason in _CLIENTS_LIMITS
    status, kind, code = _OF_CLIENTS_LIMIT if is_clients else _OF_CODE[error.code]
    param = _body_field(error.field) if error.field else None
    if error.code == "NOT_FOUND" and param in ("file_id", "batch_id"):
        code = None  # of models alone
    message = error.message
    if isinstance(error, PromptTooLongError):
        param, code, message = "prompt", "context_length_exceeded", _context_text(error)
    return Problem(
        status=status,
        message=message,
        kind=kind,
        param=param,
        code=code,
        headers=_headers_of(error),
        cause=error,
    )


def _context_text(error: PromptTooLongError) -> str:
    """The text of OpenAI's API: clients that shorten a conversation look for its first words."""
    return (
        f"This model's maximum context length is {error.max_total_tokens} tokens. However, "
        f"{error.message}."
    )


def _headers_of(error: BatonError) -> Mapping[str, str]:
    reason = {_REASON_HEADER: error.reason.lower().replace("_", "-")}
    if error.retry_after_s is None:
        return {**_HEADERS.get(error.code, _NO_HEADERS), **reason}
    # OpenAI's and Anthropic's clients prefer the exact one.
    return {
        **reason,
        "Retry-After": str(max(math.ceil(error.retry_after_s), 1)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
    }


def _body_field(field: str) -> str:
    """The body's field that a field of the pipeline's message stands for."""
    name = _PROMPT_INDEX.sub("", field)
    return _BODY_FIELDS.get(name, name)


def _of_validation_error(error: RequestValidationError) -> Problem:
    """Names the first field that has a wrong type. A field of several types has an error each."""
    first, *others = error.errors()
    if len(first["loc"]) < 2:
        return Problem(status=400, message=f"the body must be a JSON object: {first['msg']}")
    param = str(first["loc"][1])
    own = [first, *(other for other in others if other["loc"][1:2] == first["loc"][1:2])]
    reasons = dict.fromkeys(str(each["msg"]) for each in own)
    message = f"{param}: {', or: '.join(reasons)}"
    if first["type"] != "missing":
        message += f"; it is {short_repr(first['input'])}"
    return Problem(status=400, message=message, param=param)


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
    kind = _ANTHROPIC_KINDS.get(problem.status, otherwise)
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": _anthropic_message(problem),
            **_anthropic_details(problem),
        },
        "request_id": problem.request_id or None,
    }


def _anthropic_message(problem: Problem) -> str:
    """The message; that of a prompt without room has the text of Anthropic's API, which clients
    that shorten a conversation look for.
    """
    error = problem.cause
    if not isinstance(error, PromptTooLongError):
        return problem.message
    most = error.max_total_tokens - 1
    return f"prompt is too long: {error.num_tokens} tokens > {most} maximum ({error.message})"


def _anthropic_details(problem: Problem) -> dict[str, Any]:
    if not isinstance(problem.cause, ThreadUnsupportedError):
        return {}
    return {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
