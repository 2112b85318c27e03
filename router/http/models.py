"""`/v1/models`: the served models and their aliases, for clients of OpenAI and of Anthropic.
`/tokenizer_info`: a model's tokenizer, as vLLM describes it. `/v1/embeddings`: not served.
"""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.http.endpoints import (
    AUTHENTICATED_STATUSES,
    ERROR_RESPONSES,
    EndpointGroup,
    context_of,
    declared_responses,
    json_object,
    max_model_len,
)
from router.http.errors import Problem, error_response, openai_error
from router.http.json_bytes import json_response
from router.models import Model

__all__ = ["ENDPOINTS"]

_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class in transformers that a checkpoint without one has."""
_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)


@_ROUTER.get(
    "/v1/models",
    responses=declared_responses(
        "The served models.", "object", "data", errors=AUTHENTICATED_STATUSES
    ),
)
async def list_models(request: Request) -> Response:
    """Lists the served models; each alias is listed too."""
    data = [
        _fields(model, name)
        for model in context_of(request).models.usable()
        for name in model.names
    ]
    names = [model["id"] for model in data]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    return json_response({"object": "list", "data": data, "has_more": False, **ends})


@_ROUTER.get(
    "/v1/models/{model_id:path}",
    responses=declared_responses(
        "The model.", "id", "object", errors=(403, 404, *AUTHENTICATED_STATUSES)
    ),
)
async def get_model(model_id: str, request: Request) -> Response:
    """Describes one model."""
    return json_response(_fields(context_of(request).models.find(model_id), model_id))


@_ROUTER.get(
    "/tokenizer_info",
    responses=declared_responses(
        "The settings of the tokenizer.",
        "tokenizer_class",
        errors=(400, 403, 404, *AUTHENTICATED_STATUSES),
    ),
)
async def tokenizer_info(request: Request, model: str = "") -> Response:
    """Describes a model's tokenizer: its tokenizer_config.json, with the chat template in use."""
    found = context_of(request).models.find(model)
    settings = {"tokenizer_class": _TOKENIZER_CLASS, **found.tokenizer_settings}
    if found.chat.template is not None:
        settings["chat_template"] = found.chat.template.text
    return json_response(settings)


@_ROUTER.post(
    "/v1/embeddings",
    status_code=501,
    responses=ERROR_RESPONSES
    | {501: ERROR_RESPONSES[500] | {"description": "No model makes embeddings."}},
    openapi_extra={"requestBody": {"content": json_object()}},
)
async def create_embeddings(request: Request) -> Response:
    """Refuses: no served model makes embeddings."""
    problem = Problem(
        status=501,
        message="this server generates text; none of its models makes embeddings",
        kind="not_implemented_error",
        code="not_implemented",
    )
    return error_response(problem, openai_error)


def _fields(model: Model, name: str) -> dict[str, Any]:
    """The fields of OpenAI's API, then those that vLLM adds, then those of Anthropic's API."""
    created_at = datetime.fromtimestamp(model.created, UTC)
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "root": model.config.model,
        "parent": None if name == model.name else model.name,
        "max_model_len": max_model_len(model),
        "type": "model",
        "display_name": name,
        "created_at": created_at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }
