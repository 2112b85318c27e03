"""`/v1/files`: OpenAI's files. Batches read their requests from them, and write their answers."""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from baton.common.errors import InvalidArgumentError, PermissionDeniedError
from baton.common.short_texts import short_repr
from router.http.body_route import body_parsed
from router.http.endpoints import (
    AUTHENTICATED_STATUSES,
    EndpointGroup,
    batches_of,
    context_of,
    declared_responses,
    page_of,
)
from router.http.json_bytes import json_response
from router.http.multipart import FILES_PATH, FormField, parse_form
from router.requests.input_threads import convert_input
from router.tenants.tenant import tenant_of_call

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)
_FIELDS = ("id", "object", "bytes", "created_at", "filename", "purpose", "status")
_WITHOUT_BODY = (400, 404, *AUTHENTICATED_STATUSES)
_ANCHOR = "created_at"
_MAX_LIST = 10_000
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": [_ANCHOR]},
        "expires_after[seconds]": {"type": "integer"},
    },
}


@_ROUTER.post(
    FILES_PATH,
    responses=declared_responses("The file.", *_FIELDS),
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def create_file(request: Request) -> Response:
    """Keeps a file of requests."""
    _check_origin(request)
    batches, body = batches_of(request), (await request.receive()).get("body", b"")
    kind = request.headers.get("content-type", "")
    form = await convert_input(len(body), parse_form, kind, body)
    file = _required(form, "file")
    if file.filename is None:
        raise InvalidArgumentError("file has no filename; it must be a file")
    record = await batches.add_file(
        tenant_of_call().name,
        file.filename,
        _required(form, "purpose").text,
        file.value,
        _ttl_s(form),
    )
    body_parsed(request)
    return json_response(record.body())


@_ROUTER.get(
    FILES_PATH,
    responses=declared_responses(
        "The client's files.", "object", "data", "has_more", errors=_WITHOUT_BODY
    ),
)
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LIST)] = _MAX_LIST,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Lists the client's files."""
    records = await batches_of(request).files(tenant_of_call().name)
    bodies = [record.body() for record in records if purpose in (None, record.purpose)]
    return json_response(page_of(bodies if order == "desc" else bodies[::-1], limit, after))


@_ROUTER.get(
    f"{FILES_PATH}/{{file_id}}",
    responses=declared_responses("The file.", *_FIELDS, errors=_WITHOUT_BODY),
)
async def get_file(file_id: str, request: Request) -> Response:
    """Describes a file."""
    record = await batches_of(request).file(tenant_of_call().name, file_id)
    return json_response(record.body())


@_ROUTER.get(f"{FILES_PATH}/{{file_id}}/content", responses={200: {"content": {"*/*": {}}}})
async def get_file_content(file_id: str, request: Request) -> Response:
    """Returns the content of a file. Threads read it while it is sent."""
    record, path = await batches_of(request).content_path(tenant_of_call().name, file_id)
    return FileResponse(path, media_type="application/octet-stream", filename=record.filename)


@_ROUTER.delete(
    f"{FILES_PATH}/{{file_id}}",
    responses=declared_responses("It is gone.", "id", "object", "deleted", errors=_WITHOUT_BODY),
)
async def delete_file(file_id: str, request: Request) -> Response:
    """Removes a file."""
    await batches_of(request).delete_file(tenant_of_call().name, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _check_origin(request: Request) -> None:
    """Refuses a file of a page that may not call the API. Browsers send forms to other origins
    without asking first, other than JSON.

    Raises:
        PermissionDeniedError: the page is of another origin, which no flag allows.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host")
    allowed = context_of(request).config.allowed_origins
    if origin is None or origin.partition("://")[2] == host or {origin, "*"} & set(allowed):
        return
    raise PermissionDeniedError(
        f"pages of {short_repr(origin)} may not send files; see --allowed-origins"
    )


def _required(form: Mapping[str, FormField], name: str) -> FormField:
    if name not in form:
        raise InvalidArgumentError(f"{name} is missing")
    return form[name]


def _ttl_s(form: Mapping[str, FormField]) -> int | None:
    """Seconds for which the file is to stay; None if the client states none."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor is None or anchor.text != _ANCHOR:
        shown = "" if anchor is None else anchor.text
        raise InvalidArgumentError.for_field("expires_after.anchor", shown, _ANCHOR)
    text = "" if seconds is None else seconds.text
    if not text.isdecimal() or len(text) > 9:
        raise InvalidArgumentError.for_field("expires_after.seconds", text, "an integer")
    return int(text)
