"""`EndpointGroup`: endpoints that share a form of errors; their responses for OpenAPI."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from router.http.errors import ErrorBody, openai_error

__all__ = [
    "AUTHENTICATED_STATUSES",
    "COMPLETION_FIELDS",
    "ERROR_RESPONSES",
    "STATUSES_WITHOUT_BODY",
    "EndpointGroup",
    "declared_responses",
    "json_object",
]


@dataclass(frozen=True, slots=True)
class EndpointGroup:
    """Endpoints that share a form of errors.

    Attributes:
        router: the endpoints.
        error_body: makes the JSON body of their errors.
        prefix: paths that begin with it have such errors.
    """

    router: APIRouter
    error_body: ErrorBody = openai_error
    prefix: str = "/"


class ErrorInfo(BaseModel):
    """The cause of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error in the shape of OpenAI's API."""

    error: ErrorInfo


_STATUSES: Mapping[int, str] = {
    400: "The request is wrong; the message names the field, its value and the limit.",
    401: "The request lacks a valid credential.",
    403: "The client may not use the model.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "A running request has this request_id.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too many requests, or more than the client may use; see Retry-After.",
    499: "The client has left.",
    500: "A bug; the log has its cause under the request's id.",
    503: "No replica can take the request now; see Retry-After.",
    504: "The deadline passed.",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorResponse} for status, text in _STATUSES.items()
}
"""The errors of the endpoints that take a body, for the OpenAPI document."""
COMPLETION_FIELDS = ("id", "object", "model", "choices", "usage")
"""Fields of OpenAI's completions and answers to chats."""
STATUSES_WITHOUT_BODY = (500, 503)
"""Error statuses of endpoints without a body."""
AUTHENTICATED_STATUSES = (401, 429, *STATUSES_WITHOUT_BODY)
"""Error statuses of endpoints without a body that need an API key."""


def declared_responses(
    description: str,
    *fields: str,
    errors: Collection[int | str] = tuple(ERROR_RESPONSES),
    streams: bool = False,
) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint: its errors, and its success as JSON or also as events.

    Args:
        description: of the success.
        fields: those that the JSON of the success always has; it may have more.
        errors: the statuses of its errors.
        streams: whether the body may be a stream of server-sent events.
    """
    content = json_object(*fields)
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    success: dict[int | str, dict[str, Any]] = {
        200: {"description": description, "content": content}
    }
    return success | {status: ERROR_RESPONSES[status] for status in errors}


def json_object(*fields: str) -> dict[str, Any]:
    """The content of a body that is a JSON object with these fields."""
    return {"application/json": {"schema": {"type": "object", "required": list(fields)}}}
