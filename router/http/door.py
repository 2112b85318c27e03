"""What the endpoints share: the models, the limits, the declared answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import UnavailableError
from router.chat.service import ChatService
from router.http.config import HttpConfig
from router.http.errors import ErrorBody, Problem, openai_error
from router.http.json_bytes import event, json_bytes
from router.http.sse import DONE
from router.http.token_texts import TokenTexts
from router.models import Model, Models

__all__ = [
    "ANSWERS",
    "JSON_OBJECT",
    "Door",
    "Protocol",
    "answer",
    "door_of",
    "error_event",
    "json_answer",
    "max_model_len",
]


@dataclass(frozen=True, slots=True)
class Protocol:
    """A group of endpoints.

    Attributes:
        router: the endpoints.
        error_body: the shape of their errors.
        prefix: paths that begin with it have errors of that shape.
    """

    router: APIRouter
    error_body: ErrorBody = openai_error
    prefix: str = "/"


class Door:
    """The served models, for endpoints.

    Args:
        models: the served models.
        config: the limits.

    Attributes:
        is_draining: whether the router takes no more requests.
    """

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self.models = models
        self.config = config
        self.is_draining = False
        self._token_texts: dict[str, TokenTexts] = {}
        self._chats = {model.name: ChatService(model) for model in models}

    def chat(self, model: Model) -> ChatService:
        """Answers a model's chats."""
        return self._chats[model.name]

    def token_texts(self, model: Model) -> TokenTexts:
        """The texts of a model's tokens."""
        if model.name not in self._token_texts:
            self._token_texts[model.name] = TokenTexts(model.tokenizer)
        return self._token_texts[model.name]


def door_of(request: Request) -> Door:
    """What the endpoints of the request's application share."""
    return cast("Door", request.app.state.door)


def max_model_len(model: Model) -> int | None:
    """The model's context length; None while no replica is connected."""
    try:
        return model.fleet.require_model()[1].max_model_len
    except UnavailableError:
        return None


def json_answer(value: Any, status: int = 200) -> Response:
    """An answer whose body is the JSON text of a value."""
    return Response(json_bytes(value), status, media_type="application/json")


def error_event(problem: Problem) -> bytes:
    """The end of a stream of OpenAI's API that an error ends."""
    return event(openai_error(problem)) + DONE


class ErrorPart(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in the shape of OpenAI's API."""

    error: ErrorPart


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
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorAnswer} for status, text in _STATUSES.items()
} | {"default": {"description": "An error.", "model": ErrorAnswer}}
"""The errors of the endpoints, for the OpenAPI document."""

JSON_OBJECT: Mapping[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""The content of an answer that is any JSON object."""


def answer(description: str, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`ANSWERS`, and a good answer in JSON, or also as a stream of events."""
    content = dict(JSON_OBJECT)
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}, **ANSWERS}
