"""`/v1/batches`: OpenAI's batches, whose requests run beside interactive traffic."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from baton.common.errors import InvalidArgumentError
from router.http.bodies import Body, Integer, JsonObject
from router.http.body_route import BodyRoute
from router.http.endpoints import (
    AUTHENTICATED_STATUSES,
    EndpointGroup,
    batches_of,
    declared_responses,
    page_of,
)
from router.http.json_bytes import json_response
from router.tenants.tenant import tenant_of_call

__all__ = ["ENDPOINTS", "BatchBody"]

_BODIES = APIRouter(route_class=BodyRoute)
_ROUTER = APIRouter()
_PATH = "/v1/batches"
_FIELDS = ("id", "object", "endpoint", "input_file_id", "status", "request_counts")
_WITHOUT_BODY = (400, 404, *AUTHENTICATED_STATUSES)
_MAX_LIST = 100
_ANCHOR = "created_at"


class _ExpiresAfter(Body):
    """When the output files of a batch are removed.

    Attributes:
        anchor: must be created_at, the moment at which the files are made.
        seconds: after it.
    """

    anchor: str
    seconds: Integer


class BatchBody(Body):
    """A batch to run.

    Attributes:
        input_file_id: the file with its requests.
        endpoint: the path that they are for.
        completion_window: the time in which they are to be answered; then they expire.
        metadata: up to 16 texts.
        output_expires_after: when its output files are removed.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: JsonObject | None = None
    output_expires_after: _ExpiresAfter | None = None


@_BODIES.post(_PATH, responses=declared_responses("The batch.", *_FIELDS))
async def create_batch(body: BatchBody, request: Request) -> Response:
    """Begins a batch."""
    expires = body.output_expires_after
    if expires is not None and expires.anchor != _ANCHOR:
        raise InvalidArgumentError.for_field("output_expires_after.anchor", expires.anchor, _ANCHOR)
    record = await batches_of(request).add_batch(
        tenant_of_call().name,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_ttl_s=None if expires is None else expires.seconds,
    )
    return json_response(record.body())


@_ROUTER.get(
    _PATH,
    responses=declared_responses(
        "The client's batches.", "object", "data", "has_more", errors=_WITHOUT_BODY
    ),
)
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = 20,
    after: str | None = None,
) -> Response:
    """Lists the client's batches, the newest first."""
    records = await batches_of(request).batches(tenant_of_call().name)
    return json_response(page_of([record.body() for record in records], limit, after))


@_ROUTER.get(
    f"{_PATH}/{{batch_id}}",
    responses=declared_responses("The batch.", *_FIELDS, errors=_WITHOUT_BODY),
)
async def get_batch(batch_id: str, request: Request) -> Response:
    """Describes a batch and its progress."""
    record = await batches_of(request).batch(tenant_of_call().name, batch_id)
    return json_response(record.body())


@_ROUTER.post(
    f"{_PATH}/{{batch_id}}/cancel",
    responses=declared_responses("The batch.", *_FIELDS, errors=_WITHOUT_BODY),
)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Ends a batch soon. Requests that have an answer keep it."""
    record = await batches_of(request).cancel_batch(tenant_of_call().name, batch_id)
    return json_response(record.body())


_BODIES.include_router(_ROUTER)
ENDPOINTS = EndpointGroup(_BODIES)
