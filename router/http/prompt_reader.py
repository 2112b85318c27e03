"""`PromptReader`: the prompt of a request from its path and body, without answering it.

An endpoint picker reads requests this way that another router answers. The prompt is the one that
this other router makes of the body, so that both compute the same block keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from baton.common.errors import InvalidArgumentError
from baton.common.request.generation import GenerationRequest, new_request_id
from router.chat.chat_request import ChatRequest
from router.chat_service import ChatService
from router.http.anthropic_request import MessagesBody, read_messages_request
from router.http.bodies import SamplingBody
from router.http.chat import read_chat_request
from router.http.completions import generation_request
from router.http.openai_bodies import ChatBody, CompletionBody
from router.http.responses_request import ResponsesBody, read_responses_request
from router.models import Model, Models
from router.requests.input_threads import convert_input
from router.requests.json_input import parse_json

__all__ = ["PROMPT_PATHS", "PromptReader"]

_Input = ChatRequest | GenerationRequest


@dataclass(frozen=True, slots=True)
class _Protocol:
    """A path's body, and what it asks for, given the request's id."""

    body: type[SamplingBody]
    read: Callable[[Any, str], _Input]


def _completion(body: CompletionBody, request_id: str) -> GenerationRequest:
    return generation_request(body, body.prompts(), request_id)


def _response(body: ResponsesBody, request_id: str) -> ChatRequest:
    return read_responses_request(body, request_id).chat


_PROTOCOLS: Mapping[str, _Protocol] = {
    "/v1/chat/completions": _Protocol(ChatBody, read_chat_request),
    "/v1/completions": _Protocol(CompletionBody, _completion),
    "/v1/messages": _Protocol(MessagesBody, read_messages_request),
    "/v1/responses": _Protocol(ResponsesBody, _response),
}
PROMPT_PATHS = frozenset(_PROTOCOLS)
"""Paths whose bodies have prompts."""


class PromptReader:
    """Reads the prompts of requests.

    Args:
        models: the served models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._chats = {model.name: ChatService(model) for model in models}

    async def read(self, path: str, body: bytes) -> tuple[Model, GenerationRequest]:
        """Returns the model that a request is for, and the request.

        Args:
            path: one of `PROMPT_PATHS`.
            body: its body.

        Raises:
            BatonError: a field is wrong, the model does not exist, or the caller may not use it.
        """
        parsed, asked = await convert_input(len(body), _read, _PROTOCOLS[path], body)
        model = self._models.find(parsed.model or "")
        if isinstance(asked, ChatRequest):
            asked = await self._chats[model.name].prompt_of(asked)
        return model, asked


def _read(protocol: _Protocol, body: bytes) -> tuple[SamplingBody, _Input]:
    """Parses a body. May run in any thread."""
    value = parse_json("the body", body)
    try:
        parsed = protocol.body.model_validate(value)
    except ValidationError as error:
        raise InvalidArgumentError(f"the body is wrong: {error.errors()[0]['msg']}") from None
    return parsed, protocol.read(parsed, new_request_id())
