"""`/status`: the state of the router and of its cluster, for the page."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.http.endpoints import (
    STATUSES_WITHOUT_BODY,
    EndpointGroup,
    context_of,
    declared_responses,
)
from router.http.page.paths import STATUS_PATH

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)


@_ROUTER.get(
    STATUS_PATH,
    responses=declared_responses(
        "The state. It has no text of requests.",
        *("time_s", "interval_s", "cluster", "recent", "slowest", "configuration"),
        errors=(401, 403, *STATUSES_WITHOUT_BODY),
    ),
)
async def get_status(request: Request) -> Response:
    """Returns the state that operators see; docs/page.md says who may read it."""
    headers = request.headers
    read_status = context_of(request).read_status
    body = await read_status(headers.get("authorization"), headers.get("host", ""))
    return Response(body, headers={"Cache-Control": "no-store"}, media_type="application/json")
