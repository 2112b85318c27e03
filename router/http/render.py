"""`/v1/chat/completions/render` and `/v1/completions/render`: the prompts that a model would read.

The bodies are those of the endpoints that generate, and the answers have the names of vLLM's,
which lack the text.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.common.errors import InvalidArgumentError
from baton.common.request.generation import TextOrTokens
from router.http.body_route import BodyRoute, convert_body
from router.http.chat import read_chat_request
from router.http.endpoints import EndpointGroup, context_of, declared_responses
from router.http.json_bytes import json_response
from router.http.openai_bodies import ChatBody, CompletionBody
from router.http.params import request_id_of, timeout_of
from router.models import Model
from router.requests.input_threads import convert_input
from router.requests.validation import MAX_RETURNED_TOKENS

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter(route_class=BodyRoute)
ENDPOINTS = EndpointGroup(_ROUTER)
_FIELDS = ("request_id", "model", "prompt", "token_ids")
_BYTES_PER_TOKEN = 8  # of JSON: the digits of an id and a comma


def _responses_with_list() -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint whose success is a list of prompts."""
    responses = declared_responses("The prompts.", *_FIELDS)
    content = responses[200]["content"]["application/json"]
    content["schema"] = {"type": "array", "items": content["schema"]}
    return responses


@_ROUTER.post("/v1/chat/completions/render", responses=declared_responses("The prompt.", *_FIELDS))
async def render_chat(body: ChatBody, request: Request) -> Response:
    """Returns the prompt that a chat becomes, as text and as token ids."""
    context = context_of(request)
    model = context.models.find(body.model or "")
    request_id = request_id_of(request, body)
    chat = await convert_body(request, read_chat_request, body, request_id)
    body.drop_ignored()
    (prompt,) = (await context.chat(model).prompt_of(chat)).prompts
    prompts = _Prompts(body, model, timeout_of(request), add_special=chat.add_special_tokens)
    rendered = await prompts.render(f"chatcmpl-{request_id}", prompt)
    return await _response(rendered, len(rendered["token_ids"]))


@_ROUTER.post("/v1/completions/render", responses=_responses_with_list())
async def render_completion(body: CompletionBody, request: Request) -> Response:
    """Returns the prompts of completions, as texts and as token ids, in their order."""
    model = context_of(request).models.find(body.model or "")
    request_id = request_id_of(request, body)
    await convert_body(request, body.stated)  # refuses what the endpoint that generates refuses
    add_special = body.add_special_tokens is not False
    prompts = _Prompts(body, model, timeout_of(request), add_special=add_special)
    rendered, num_tokens = [], 0
    for i, prompt in enumerate(body.prompts()):
        rendered.append(await prompts.render(f"cmpl-{request_id}-{i}", prompt))
        num_tokens += len(rendered[-1]["token_ids"])
        if num_tokens > MAX_RETURNED_TOKENS:
            raise InvalidArgumentError(
                f"prompt has more than {MAX_RETURNED_TOKENS} tokens in all its prompts, the most "
                "that are returned at once"
            )
    return await _response(rendered, num_tokens)


async def _response(value: Any, num_tokens: int) -> Response:
    return await convert_input(_BYTES_PER_TOKEN * num_tokens, json_response, value)


class _Prompts:
    """Renders the prompts of one body.

    Args:
        body: the body.
        model: the model.
        timeout_s: seconds until the client's deadline; None if it states none.
        add_special: whether the tokenizer adds special tokens to texts.
    """

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        model: Model,
        timeout_s: float | None,
        *,
        add_special: bool,
    ) -> None:
        self._body = body
        self._model = model
        self._timeout_s = timeout_s
        self._add_special = add_special

    async def render(self, request_id: str, prompt: TextOrTokens) -> dict[str, Any]:
        """Returns a prompt as its request would have it.

        Raises:
            InvalidArgumentError: the prompt does not fit the model; names the field.
            UnavailableError: no decode replica became ready in time.
        """
        limits = await self._model.wait_for_limits(self._body.priority or 0, self._timeout_s)
        token_ids: Sequence[int] = await self._model.encode_prompt(
            prompt,
            limits,
            self._body.truncate_prompt_tokens,
            add_special_tokens=self._add_special,
        )
        is_whole = isinstance(prompt, str) and self._body.truncate_prompt_tokens is None
        text = prompt if is_whole else await self._text(token_ids)
        return {
            "request_id": request_id,
            "model": self._body.model or self._model.name,
            "prompt": text,
            "token_ids": list(token_ids),
        }

    async def _text(self, token_ids: Sequence[int]) -> str:
        return await self._model.decode(token_ids, skip_special_tokens=False)
