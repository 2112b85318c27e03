"""`LoadCheck`: what happens to requests before their bodies are parsed. They wait for their turn,
and those that would take too long are refused.

Under overload most requests are refused, so a refusal must cost little. Parsing a body and making
a request of it costs several times as much.
"""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.params import timeout_of
from router.models import Model, Models

__all__ = ["LoadCheck"]

_COMPLETIONS_PATH = "/v1/completions"
_GENERATING_PATHS = frozenset(
    {_COMPLETIONS_PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages"}
)
_MAX_BODY_BYTES = 64 * 1024
"""Larger bodies are rare; to search them would cost too much."""
_PRIORITY = b'"priority"'
_MAX_TOKENS = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})\b')


class LoadCheck:
    """Wraps the application inside of `RequestMiddleware`, which has read the body.

    What the check needs of a body is searched for, which never refuses more than the check that
    follows the parsing: requests with large bodies, a priority or one of several models are left
    to that one.

    Args:
        app: the application.
        served: the models.
    """

    def __init__(self, app: ASGIApp, *, served: Models) -> None:
        self._app = app
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request.

        Raises:
            ResourceExhaustedError: it would probably not end by its deadline, or too many wait.
            DeadlineExceededError: the deadline passed before its turn.
            InvalidArgumentError: the header with its deadline is bad.
        """
        if scope["type"] == "http" and scope["path"] in _GENERATING_PATHS:
            receive = await self._check(scope, receive)
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive) -> Receive:
        """Checks a request by what is known of it; returns a `receive` that gives its body."""
        model = self._served.only
        if model is None:
            return receive
        message = await receive()
        timeout_s, body = timeout_of(Request(scope)), message.get("body", b"")
        if len(body) <= _MAX_BODY_BYTES and _PRIORITY not in body:
            model.check_load(timeout_s, _max_tokens(scope["path"], body, model))
        await model.enter(timeout_s)
        return _giving(message, receive)


def _max_tokens(path: str, body: bytes, model: Model) -> int | None:
    """The most tokens of an answer; None if a chat states no number."""
    if stated := _MAX_TOKENS.search(body):
        return int(stated[1])
    return model.default_max_tokens if path == _COMPLETIONS_PATH else None


def _giving(first: Message, receive: Receive) -> Receive:
    """Returns a `receive` that gives a message, then what the server gives."""
    pending: list[Message] = [first]

    async def give() -> Message:
        return pending.pop() if pending else await receive()

    return give
