"""`HttpContext` and `EndpointGroup`: what endpoints share; their responses for OpenAPI."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from baton.common.errors import InvalidArgumentError, UnavailableError
from router.batches.service import BatchService
from router.chat_service import ChatService
from router.config.http import HttpConfig
from router.http.errors import ErrorBody, openai_error
from router.http.token_texts import TokenTexts
from router.models import Model, Models

__all__ = [
    "AUTHENTICATED_STATUSES",
    "COMPLETION_FIELDS",
    "ERROR_RESPONSES",
    "STATUSES_WITHOUT_BODY",
    "EndpointGroup",
    "HttpContext",
    "ReadMetrics",
    "ReadStatus",
    "batches_of",
    "context_of",
    "declared_responses",
    "json_object",
    "max_model_len",
    "no_metrics",
    "no_status",
    "page_of",
]

_STATUSES: Mapping[int, str] = {
    400: "The request is wrong; the message names the field, its value and the limit.",
    401: "The request lacks a valid credential.",
    403: "The client may not use the model.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "A running request has this request_id.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "More than the client may use; see Retry-After.",
    499: "The client has left.",
    500: "A bug; the log has its cause under the request's id.",
    503: "No replica can take the request now, or not in time; see Retry-After.",
    504: "The deadline passed.",
}
COMPLETION_FIELDS = ("id", "object", "model", "choices", "usage")
"""Fields of OpenAI's completions and answers to chats."""
STATUSES_WITHOUT_BODY = (500, 503)
"""Error statuses of endpoints without a body."""
AUTHENTICATED_STATUSES = (401, 429, *STATUSES_WITHOUT_BODY)
"""Error statuses of endpoints without a body that need an API key."""


ReadMetrics = Callable[[], Awaitable[bytes]]
"""Returns metrics in Prometheus' text format.

Raises:
    UnavailableError: they cannot be read now.
"""


async def no_metrics() -> bytes:
    """Returns no metrics."""
    return b""


ReadStatus = Callable[[str | None, str], Awaitable[bytes]]
"""Returns the state of the router as JSON, to an operator with this authorization header, who has
asked for this host (the header Host).

Raises:
    UnauthenticatedError: the header lacks the cluster's token.
    PermissionDeniedError: this router shows its state to nobody.
"""


async def no_status(header: str | None, asked_host: str) -> bytes:
    """Returns an object without fields."""
    return b"{}"


class HttpContext:
    """The served models and the limits, for endpoints.

    Args:
        models: the served models.
        config: the limits.
        read_metrics: returns what Prometheus reads.
        admits_reader: whether a reader with an authorization header may read them.
        read_status: returns what the page shows of the router.

    Attributes:
        batches: the files and batches of clients; None if the router keeps none.
        is_draining: whether the router was asked to stop, and takes no more connections soon.
    """

    def __init__(
        self,
        models: Models,
        config: HttpConfig,
        read_metrics: ReadMetrics,
        admits_reader: Callable[[str | None], bool],
        read_status: ReadStatus = no_status,
    ) -> None:
        self.models = models
        self.config = config
        self.read_metrics = read_metrics
        self.admits_reader = admits_reader
        self.read_status = read_status
        self.batches: BatchService | None = None
        self.is_draining = False
        self._token_texts: dict[str, TokenTexts] = {}
        self._chats = {model.name: ChatService(model) for model in models}

    def chat(self, model: Model) -> ChatService:
        """The chat service of a model."""
        return self._chats[model.name]

    def token_texts(self, model: Model) -> TokenTexts:
        """The texts of a model's tokens."""
        if model.name not in self._token_texts:
            self._token_texts[model.name] = TokenTexts(model.tokenizer)
        return self._token_texts[model.name]


def context_of(request: Request) -> HttpContext:
    """The context of the request's application."""
    return cast("HttpContext", request.app.state.context)


def batches_of(request: Request) -> BatchService:
    """The files and batches of the router, whose endpoints exist only if it keeps some."""
    batches = context_of(request).batches
    assert batches is not None
    return batches


def page_of(objects: Sequence[Mapping[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list, in OpenAI's form.

    Args:
        objects: all of the list.
        limit: the most objects of a page.
        after: the id of the object before the page; None for the first page.

    Raises:
        InvalidArgumentError: the list has no object with the id `after`.
    """
    ids = [each["id"] for each in objects]
    if after is not None and after not in ids:
        raise InvalidArgumentError.for_field("after", after, "the id of an object of the list")
    start = 0 if after is None else ids.index(after) + 1
    page, left = objects[start : start + limit], ids[start + limit :]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": bool(left),
    }


def max_model_len(model: Model) -> int | None:
    """The model's context length; None while no replica is connected."""
    try:
        return model.fleet.require_model()[1].max_model_len
    except UnavailableError:
        return None


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


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorResponse} for status, text in _STATUSES.items()
}
"""The errors of the endpoints that take a body, for the OpenAPI document."""


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
