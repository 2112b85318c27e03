"""Whether the process lives, whether it can serve, and its metrics for Prometheus."""

from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from baton.common.version import __version__
from router.http.endpoints import (
    AUTHENTICATED_STATUSES,
    STATUSES_WITHOUT_BODY,
    EndpointGroup,
    context_of,
    declared_responses,
    json_object,
)
from router.http.json_bytes import json_response
from router.models import Model
from rpc.metrics_server import CHALLENGE

__all__ = ["ENDPOINTS"]

_READINESS = ("ready", "draining", "models")
_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


@_ROUTER.get(
    "/health",
    responses=declared_responses("The process lives.", "status", errors=STATUSES_WITHOUT_BODY),
)
async def health() -> Response:
    """Answers while the process lives."""
    return json_response({"status": "ok"})


@_ROUTER.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def ping() -> Response:
    """Answers as `/health` does; some platforms ask here."""
    return json_response({"status": "ok"})


@_ROUTER.get(
    "/ready",
    responses={
        **declared_responses(
            "Every model can be served.", *_READINESS, errors=STATUSES_WITHOUT_BODY
        ),
        503: {"description": "A model cannot be served.", "content": json_object(*_READINESS)},
    },
)
async def ready(request: Request) -> Response:
    """Answers 200 if every model can be served and the router takes requests, else 503."""
    context = context_of(request)
    models = [_state(model) for model in context.models]
    is_ready = not context.is_draining and all(model["ready"] for model in models)
    body = {"ready": is_ready, "draining": context.is_draining, "models": models}
    return json_response(body, 200 if is_ready else 503)


@_ROUTER.get(
    "/version",
    responses=declared_responses("The version.", "version", errors=AUTHENTICATED_STATUSES),
)
async def version() -> Response:
    """Returns Baton's version."""
    return json_response({"version": __version__})


def _state(model: Model) -> dict[str, Any]:
    fleet = model.fleet
    return {
        "id": model.name,
        "ready": fleet.can_serve,
        "decode_replicas": len(fleet.decode.candidates),
        "prefill_replicas": len(fleet.prefill.candidates),
    }


@_ROUTER.get(
    "/metrics",
    responses={
        **declared_responses("The metrics.", errors=STATUSES_WITHOUT_BODY),
        401: {"description": "The caller lacks the token for metrics."},
        200: {"description": "The metrics, in Prometheus' text format.", "content": _TEXT},
    },
)
async def metrics(request: Request) -> Response:
    """Returns the router's metrics; docs/metrics.md lists them."""
    context = context_of(request)
    if not context.admits_reader(request.headers.get("authorization")):
        return Response(status_code=401, headers={"WWW-Authenticate": CHALLENGE})
    return Response(await context.read_metrics(), media_type=CONTENT_TYPE_LATEST)
