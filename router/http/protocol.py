"""`Protocol`: a group of endpoints; the responses that they declare for the OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from router.http.errors import ErrorBody, openai_error

__all__ = ["ERROR_RESPONSES", "JSON_OBJECT", "Protocol", "declared_responses"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """A group of endpoints.

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
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "Too many requests are running; see Retry-After.",
    499: "The client has left.",
    500: "A bug; the log has its cause under the request's id.",
    503: "No replica can take the request now; see Retry-After.",
    504: "The deadline passed.",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorResponse} for status, text in _STATUSES.items()
} | {"default": {"description": "An error.", "model": ErrorResponse}}
"""The errors of the endpoints, for the OpenAPI document."""

JSON_OBJECT: Mapping[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""The content of a response that is any JSON object."""


def declared_responses(
    description: str, *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint: its errors, and its success as JSON or also as events.

    Args:
        description: of the success.
        streams: whether the body may be a stream of server-sent events.
    """
    content = dict(JSON_OBJECT)
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}, **ERROR_RESPONSES}
