"""`build_app`: the HTTP application over the served models."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from baton.common.errors import BatonError
from baton.common.version import __version__
from router.config.http import HttpConfig
from router.http import (
    anthropic,
    batches,
    chat,
    completions,
    files,
    health,
    models,
    render,
    responses,
    tokens,
)
from router.http.endpoints import (
    EndpointGroup,
    HttpContext,
    ReadMetrics,
    ReadStatus,
    no_metrics,
    no_status,
)
from router.http.errors import ErrorBody, error_response, openai_error, problem_of
from router.http.load_check import LoadCheck
from router.http.middleware import RequestMiddleware
from router.http.page import assets, status
from router.models import Models
from router.processes.counts import Accounts, LocalAccounts
from router.tenants.tenants import Tenants
from rpc.interceptors import CountCall

__all__ = ["build_app", "build_local_app"]

_GROUPS: Sequence[EndpointGroup] = (
    completions.ENDPOINTS,
    responses.ENDPOINTS,
    anthropic.ENDPOINTS,
    chat.ENDPOINTS,
    render.ENDPOINTS,
    models.ENDPOINTS,
    tokens.ENDPOINTS,
    health.ENDPOINTS,
)
"""The endpoints. A new group needs a line here."""
_PAGE_GROUPS: Sequence[EndpointGroup] = (assets.ENDPOINTS, status.ENDPOINTS)
"""Those of the page, which a flag turns off."""
_BATCH_GROUPS: Sequence[EndpointGroup] = (files.ENDPOINTS, batches.ENDPOINTS)
"""Those of files and batches, which a flag turns on."""


class _App(FastAPI):
    """An application whose document has no status 422: bodies that do not fit get 400."""

    @override
    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def build_app(
    served: Models,
    config: HttpConfig,
    tenants: Tenants,
    read_metrics: ReadMetrics = no_metrics,
    admits_reader: Callable[[str | None], bool] = lambda header: True,
    count_call: CountCall = lambda status: None,
    accounts: Accounts | None = None,
    read_status: ReadStatus = no_status,
) -> FastAPI:
    """The application.

    Args:
        served: the models.
        config: the limits.
        tenants: the clients.
        read_metrics: returns what `/metrics` shows.
        admits_reader: whether a reader with an authorization header may read them.
        count_call: called with the status of each answer.
        accounts: where the ids of running requests are kept; None for this process.
        read_status: returns what the page shows of the router.
    """
    context = HttpContext(served, config, read_metrics, admits_reader, read_status)
    page = _PAGE_GROUPS if config.page else ()
    stored = () if config.batch_folder is None else _BATCH_GROUPS
    app = _new_app(context, (*_GROUPS, *page, *stored))
    app.add_middleware(LoadCheck, served=served)  # inside of the next one
    app.add_middleware(
        RequestMiddleware,
        count_call=count_call,
        tenants=tenants,
        max_request_bytes=config.max_request_bytes,
        body_timeout_s=config.body_timeout_s,
        error_body_of=_error_body_of,
        running_ids=(accounts or LocalAccounts()).running_ids("http"),
    )
    if config.allowed_origins:
        _allow_origins(app, config)
    return app


def build_local_app(context: HttpContext) -> FastAPI:
    """The endpoints without middleware, for calls in this process; see `LocalCalls`."""
    return _new_app(context, _GROUPS)


def _new_app(context: HttpContext, groups: Iterable[EndpointGroup]) -> FastAPI:
    app = _App(
        title="Baton",
        version=__version__,
        description="LLM serving with OpenAI's API",
        openapi_url="/openapi.json",
        # FastAPI's pages load scripts from a public server.
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    for group in groups:  # not by `include_router`, which searches each router twice per request
        app.router.routes.extend(group.router.routes)
    for kind in (BatonError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    return app


def _allow_origins(app: FastAPI, config: HttpConfig) -> None:
    """Answers browsers' questions whether a page may call the API."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "retry-after", "retry-after-ms", "x-baton-reason"),
    )


def _error_body_of(path: str) -> ErrorBody:
    """The shape of errors of a path: that of the group with the longest fitting prefix."""
    fitting = [group for group in _GROUPS if path.startswith(group.prefix)]
    longest = max(fitting, key=lambda group: len(group.prefix), default=None)
    return openai_error if longest is None else longest.error_body


async def _answer_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error, request.state.request_id)
    return error_response(problem, _error_body_of(request.url.path))
