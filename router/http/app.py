"""`build_app`: the HTTP application over the served models."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from baton.version import __version__
from router.http import anthropic, chat, completions, health, models, responses, tokens
from router.http.config import HttpConfig
from router.http.context import HttpContext
from router.http.errors import ErrorBody, error_response, openai_error, problem_of
from router.http.middleware import RequestMiddleware
from router.http.protocol import Protocol
from router.models import Models

__all__ = ["build_app"]

_PROTOCOLS: Sequence[Protocol] = (
    completions.PROTOCOL,
    responses.PROTOCOL,
    anthropic.PROTOCOL,
    chat.PROTOCOL,
    models.PROTOCOL,
    tokens.PROTOCOL,
    health.PROTOCOL,
)
"""The endpoints. A new protocol needs a line here."""


def build_app(served: Models, config: HttpConfig) -> FastAPI:
    """The application.

    Args:
        served: the models.
        config: the limits.
    """
    app = FastAPI(
        title="Baton",
        version=__version__,
        description="LLM serving with OpenAI's API",
        openapi_url="/openapi.json",
    )
    app.state.context = HttpContext(served, config)
    for protocol in _PROTOCOLS:
        app.include_router(protocol.router)
    for kind in (BatonError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(
        RequestMiddleware,
        max_request_bytes=config.max_request_bytes,
        body_timeout_s=config.body_timeout_s,
        error_body_of=_error_body_of,
    )
    if config.allowed_origins:
        _allow_origins(app, config)
    return app


def _allow_origins(app: FastAPI, config: HttpConfig) -> None:
    """Answers browsers' questions whether a page may call the API."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id",),
    )


def _error_body_of(path: str) -> ErrorBody:
    """The shape of errors of a path: that of the protocol with the longest fitting prefix."""
    fitting = [protocol for protocol in _PROTOCOLS if path.startswith(protocol.prefix)]
    longest = max(fitting, key=lambda protocol: len(protocol.prefix), default=None)
    return openai_error if longest is None else longest.error_body


async def _answer_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error, request.state.request_id)
    return error_response(problem, _error_body_of(request.url.path))
