"""`RequestMiddleware`: what every request gets before the application sees it.

- an id: the client's `X-Request-Id`, if it is fit for one, or a new one; echoed in the answer
- its body read whole, up to a limit of bytes and time
- a line in the log; an answer 500 without the cause if a bug raises
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.errors import ErrorBody, Problem, error_response, http_problem, problem_of

__all__ = ["RequestMiddleware"]

_LOGGER = logging.getLogger("baton.http")
_FIT_ID = re.compile(rb"[\x21-\x7e]{1,100}")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""Where OpenAI's and Anthropic's clients read the id."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class RequestMiddleware:
    """Wraps the application; the module's docstring lists what it does.

    Args:
        app: the application.
        max_request_bytes: the most bytes of a body.
        body_timeout_s: how long a body may take.
        error_body_of: the shape of errors by path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_request_bytes: int,
        body_timeout_s: float,
        error_body_of: Callable[[str], ErrorBody],
    ) -> None:
        self._app = app
        self._max_request_bytes = max_request_bytes
        self._body_timeout_s = body_timeout_s
        self._error_body_of = error_body_of
        self._running_ids: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, send, self._running_ids)
        self._running_ids.add(call.request_id)
        try:
            problem = await self._problem_of_serving(scope, receive, call)
            if problem is not None and not call.status:
                answer = error_response(problem, self._error_body_of(scope["path"]))
                await answer(scope, receive, call.send)
        finally:
            self._running_ids.discard(call.request_id)
            call.log()

    async def _problem_of_serving(
        self, scope: Scope, receive: Receive, call: "_Call"
    ) -> Problem | None:
        """Serves one request; returns why it failed, unless the application has answered."""
        try:
            return await self._serve(scope, receive, call)
        except asyncio.CancelledError:  # the server stops, and this task with it
            return _closing(503, "the server is stopping; try again")
        except Exception as error:
            return problem_of(error, call.request_id)

    async def _serve(self, scope: Scope, receive: Receive, call: "_Call") -> Problem | None:
        """Runs the application; returns why it cannot."""
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, call.send)
            return None
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if int(declared) > self._max_request_bytes:
            return self._too_large()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            return _closing(408, f"the body did not arrive within {self._body_timeout_s:g} s")
        if body is None:
            return self._too_large()
        if body and not _is_json(headers.get(b"content-type", b"")):
            return http_problem(415, "the body must have the content type application/json")
        await self._app(scope, _replaying(body, receive), call.send)
        return None

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if it is too large. It ends early if the client leaves."""
        parts: list[bytes] = []
        num_bytes, more = 0, True
        while more:
            message = await receive()
            part = message.get("body", b"")
            more = message.get("more_body", False)
            num_bytes += len(part)
            if num_bytes > self._max_request_bytes:
                return None
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> Problem:
        return _closing(413, f"the body has more than {self._max_request_bytes} bytes")


def _closing(status: int, message: str) -> Problem:
    """A problem after which the connection cannot be used: the body was not read to its end."""
    return http_problem(status, message, {"Connection": "close"})


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body, then what the server gives."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _Call:
    """One request, for its id and its log line.

    Args:
        scope: the request's.
        send: the server's.
        running_ids: ids of running requests. A client may use one several times at once; the
            pipeline needs ids that differ, so that such a request gets a longer one.

    Attributes:
        request_id: the client's or a new one; also in the scope's state.
        status: of the answer, once it has begun.
    """

    def __init__(self, scope: Scope, send: Send, running_ids: Collection[str]) -> None:
        self._scope = scope
        self._send = send
        self._start = time.monotonic()
        self.status = 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self._echoed_id = given if _FIT_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.request_id = self._echoed_id.decode()
        if self.request_id in running_ids:
            self.request_id += f"-{uuid.uuid4().hex[:12]}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = self.request_id

    async def send(self, message: Message) -> None:
        """Adds the id to the headers of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [(name, self._echoed_id) for name in _ID_HEADERS]
            message["headers"] = [*message.get("headers", ()), *ids]
        await self._send(message)

    def log(self) -> None:
        """Writes the log line."""
        path = self._scope["path"]
        _LOGGER.log(
            logging.DEBUG if path in _QUIET_PATHS else logging.INFO,
            "call method=%s path=%s status=%d duration_ms=%.1f client=%s request_id=%s",
            self._scope["method"],
            ascii(path[:200]),
            self.status,
            (time.monotonic() - self._start) * 1000,
            (self._scope.get("client") or ("",))[0],
            ascii(self.request_id),
        )
