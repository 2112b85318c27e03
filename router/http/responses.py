"""`/v1/responses` and its `input_tokens`: OpenAI's Responses API without stored responses."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.common.request.answer import CandidateOutput
from router.http.answering import stream_response, whole_response
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import EndpointGroup, context_of, declared_responses
from router.http.json_bytes import json_response
from router.http.logprobs import chat_logprobs
from router.http.params import request_id_of, timeout_of
from router.http.responses_answer import ResponseAnswer, ResponseStream
from router.http.responses_request import (
    CountedResponsesBody,
    ResponsesBody,
    counted_conversation,
    read_responses_request,
)

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER)


@_ROUTER.post(
    "/v1/responses",
    responses=declared_responses(
        "The response.", "id", "object", "status", "model", "output", streams=True
    ),
)
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answers a conversation. Nothing is stored."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    asked = await convert_body(
        request, read_responses_request, body, request_id, model.default_params
    )
    body.drop_ignored()
    texts = context.token_texts(model)

    def logprobs_of(output: CandidateOutput) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(texts, output.token_ids, output.logprobs)[
            "content"
        ]
        return content

    response = ResponseAnswer(asked, body.model or model.name, logprobs_of)
    outputs = context.chat(model).stream(asked.chat, timeout_of(request))
    if body.stream:
        return stream_response(outputs, ResponseStream(response), request, request_id)
    return await whole_response(outputs, response, request)


@_ROUTER.post(
    "/v1/responses/input_tokens",
    responses=declared_responses("The number of tokens.", "object", "input_tokens"),
)
async def count_input_tokens(body: CountedResponsesBody, request: Request) -> Response:
    """Counts the tokens of a conversation, as the chat template writes it."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    conversation = await convert_body(request, counted_conversation, body, request_id)
    num_tokens = await context.chat(model).count_tokens(conversation)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})
