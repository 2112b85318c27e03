"""The router's metrics, for Prometheus."""

import asyncio

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from router.http.context import context_of
from router.http.endpoints import STATUSES_WITHOUT_BODY, EndpointGroup, declared_responses
from rpc.metrics_access import CHALLENGE

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


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
    text = await asyncio.to_thread(generate_latest, context.metrics)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
