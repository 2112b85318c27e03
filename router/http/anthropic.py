"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages API."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.http.answering import stream_response, whole_response
from router.http.anthropic_answer import MessageAnswer, MessageStream
from router.http.anthropic_request import (
    MessagesBody,
    counted_conversation,
    read_messages_request,
)
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import EndpointGroup, context_of, declared_responses
from router.http.errors import AnthropicErrorResponse, anthropic_error
from router.http.json_bytes import json_response
from router.http.params import request_id_of, timeout_of

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER, anthropic_error, "/v1/messages")


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
