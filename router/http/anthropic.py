"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages API, and its answers."""

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from baton.common.errors import AbortedError
from baton.common.request.answer import CandidateOutput, TokenCounts
from router.http.answer_parts import (
    AnswerParts,
    Part,
    PartAdded,
    PartClosed,
    PartKind,
    PartOpened,
    Step,
)
from router.http.answering import stream_response, whole_response
from router.http.anthropic_request import (
    MessagesBody,
    counted_conversation,
    read_messages_request,
)
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import EndpointGroup, context_of, declared_responses
from router.http.errors import AnthropicErrorResponse, Problem, anthropic_error
from router.http.json_bytes import json_response
from router.http.params import request_id_of, timeout_of

__all__ = ["ENDPOINTS", "Event", "MessageAnswer", "MessageStream"]

Event = dict[str, Any]

_NO_USAGE = TokenCounts()
_DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}
"""The type of a delta and the name of its text."""
_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER, anthropic_error, "/v1/messages")


def _new_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


class MessageAnswer:
    """The message of one request.

    Args:
        model: the name of the model, as the answer states it.
        new_id: makes the message's id.
    """

    def __init__(self, model: str, new_id: Callable[[], str] = _new_id) -> None:
        self.parts = AnswerParts()
        self._model = model
        self._id = new_id()

    def push(self, output: CandidateOutput) -> list[Step]:
        """Adds an output; returns what it changes."""
        return self.parts.push(output)

    def finish(self) -> list[Step]:
        """Ends the message; returns what that changes.

        Raises:
            AbortedError: an operator aborted the request.
        """
        if self.parts.finish_reason == "abort":
            raise AbortedError("the request was aborted; retry it")
        return self.parts.finish()

    def body(self) -> dict[str, Any]:
        """The message as it is now."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_block(part) for part in self.parts.parts],
            **self.end(),
            "usage": self.usage(),
        }

    def end(self) -> dict[str, str | None]:
        """Why the message ended."""
        reason, stop = self.parts.finish_reason, self.parts.matched_stop
        if reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def usage(self) -> dict[str, Any]:
        """Token counts; `input_tokens` are those that no cache had."""
        usage = self.parts.usage or _NO_USAGE
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


class MessageStream:
    """The events of one message.

    Args:
        answer: the message, of which nothing was pushed yet.
    """

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer
        self._has_started = False

    def push(self, output: CandidateOutput) -> list[Event]:
        """The events of an output."""
        if output.prompt_usage is not None:
            self._answer.parts.usage = output.prompt_usage
        return [*self._start(), *_events(self._answer.push(output))]

    def finish(self) -> list[Event]:
        """The last events. Called once the outputs have ended.

        Raises:
            AbortedError: an operator aborted the request.
        """
        events = [*self._start(), *_events(self._answer.finish())]
        usage = self._answer.usage()
        events.append({"type": "message_delta", "delta": self._answer.end(), "usage": usage})
        events.append({"type": "message_stop"})
        return events

    def fail(self, problem: Problem) -> list[Event]:
        """The last event of a message that fails."""
        return [anthropic_error(problem)]

    def _start(self) -> list[Event]:
        """The events that come before all others; none the second time."""
        if self._has_started:
            return []
        self._has_started = True
        return [{"type": "message_start", "message": self._answer.body()}, {"type": "ping"}]


def _events(steps: list[Step]) -> list[Event]:
    events: list[Event] = []
    for step in steps:
        index = step.part.index
        match step:
            case PartOpened(part):
                block = _block(Part(part.kind, index, part.call))
                events.append(
                    {"type": "content_block_start", "index": index, "content_block": block}
                )
            case PartAdded(part, text):
                events.append(_delta(index, *_DELTAS[part.kind], text))
            case PartClosed(part):
                if part.kind is PartKind.REASONING:
                    events.append(_delta(index, "signature_delta", "signature", ""))
                events.append({"type": "content_block_stop", "index": index})
    return events


def _delta(index: int, kind: str, name: str, text: str) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}


def _block(part: Part) -> dict[str, Any]:
    """The content block of a part. Thinking has no signature: nothing checks one."""
    if part.call is not None:
        call = {"id": part.call.id, "name": part.call.name, "input": _input_of(part.text)}
        return {"type": "tool_use", **call}
    if part.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call. Of JSON that was cut short, the values that are whole; nothing
    of a text that is no JSON object.
    """
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _declared_responses(
    description: str, *fields: str, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """`declared_responses` with errors of Anthropic's shape."""
    responses = declared_responses(description, *fields, streams=streams)
    return {
        status: fields | {"model": AnthropicErrorResponse} if "model" in fields else fields
        for status, fields in responses.items()
    }


@_ROUTER.post(
    "/v1/messages",
    responses=_declared_responses(
        "The message.", "id", "type", "role", "model", "content", "usage", streams=True
    ),
)
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answers a conversation. `anthropic-version` and `x-api-key` may have any value."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    chat = await convert_body(
        request,
        read_messages_request,
        body,
        request_id,
        can_limit_thinking=model.chat.reasoning_marks is not None,
    )
    body.drop_ignored()
    message = MessageAnswer(body.model or model.name)
    outputs = context.chat(model).stream(chat, timeout_of(request))
    if body.stream:
        return stream_response(outputs, MessageStream(message), request, request_id)
    return await whole_response(outputs, message, request)


@_ROUTER.post(
    "/v1/messages/count_tokens",
    responses=_declared_responses("The number of tokens.", "input_tokens"),
)
async def count_tokens(body: MessagesBody, request: Request) -> Response:
    """Counts the tokens of a conversation, as the chat template writes it."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    conversation = await convert_body(request, counted_conversation, body)
    body.drop_ignored()
    return json_response({"input_tokens": await context.chat(model).count_tokens(conversation)})
