"""`/tokenize` and `/detokenize`, with the bodies that vLLM has."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.common.errors import InvalidArgumentError
from router.chat.chat_request import Conversation
from router.chat.messages import conversation_of
from router.http.bodies import Array, Body, JsonObject, TokenIds
from router.http.body_route import BodyRoute, convert_body
from router.http.endpoints import EndpointGroup, context_of, declared_responses, max_model_len
from router.http.json_bytes import json_response
from router.requests.validation import (
    MAX_DETOKENIZE_TOKEN_IDS,
    MAX_TOKENIZE_CHARS,
    check_length,
    check_token_ids,
)

__all__ = ["ENDPOINTS", "DetokenizeBody", "TokenizeBody"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER)


class TokenizeBody(Body):
    """A text or a chat to encode.

    Attributes:
        prompt: the text.
        messages: the chat, as in `/v1/chat/completions`.
        add_special_tokens: default: true for a text; false for a chat, whose template writes them.
        return_token_strs: whether the answer has the tokens' texts.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Array[JsonObject] | None = None
    tools: Array[JsonObject] | None = None
    documents: Array[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def conversation(self) -> Conversation:
        """The chat, checked.

        Raises:
            InvalidArgumentError: a part is malformed; names it.
        """
        return conversation_of(
            self.messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = None
    tokens: TokenIds


@_ROUTER.post(
    "/tokenize",
    responses=declared_responses(
        "The token ids.", "count", "max_model_len", "tokens", "token_strs"
    ),
)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Encodes a text or a chat as a request for a completion would."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgumentError("exactly one of prompt and messages must be set")
    if body.prompt is not None:
        check_length("prompt", body.prompt, MAX_TOKENIZE_CHARS)
        token_ids = await model.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    else:
        conversation = await convert_body(request, body.conversation)
        token_ids = await context.chat(model).encode(
            conversation, add_special_tokens=bool(body.add_special_tokens)
        )
    texts = context.token_texts(model)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": max_model_len(model),
            "tokens": token_ids,
            "token_strs": list(map(texts.text, token_ids)) if body.return_token_strs else None,
        }
    )


@_ROUTER.post("/detokenize", responses=declared_responses("The text.", "prompt"))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Decodes token ids; special tokens are part of the text."""
    model = context_of(request).models.find(body.model or "")
    check_length("tokens", body.tokens, MAX_DETOKENIZE_TOKEN_IDS, unit="ids")
    check_token_ids("tokens", body.tokens, model.vocab_size)
    text = await model.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})
