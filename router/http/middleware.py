"""`RequestMiddleware`: what every request gets before the application sees it.

- the client that it comes from, which must have a credential if the router asks for one, and
  whose limits are checked before the body is read
- an id: the client's `X-Request-Id`, if it is fit for one, or a new one; echoed in the answer
- its body read whole, up to a limit of bytes and time; all bodies that arrive or are not parsed yet
  have a limit too
- a line in the log; an answer 500 without the cause if a bug raises
"""

import asyncio
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.common.errors import Reason, ResourceExhaustedError
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from baton.common.request.slo import Slo
from router.http.errors import ErrorBody, Problem, error_response, http_problem, problem_of
from router.http.multipart import FILES_PATH, is_form
from router.http.page.paths import ASSET_PATHS, STATUS_PATH
from router.processes.counts import RunningIds
from router.tenants.tenants import Tenants, credentials_of
from rpc.call_sessions import session_from
from rpc.interceptors import CountCall
from rpc.logs import CallInfo, log_fields, serving

__all__ = ["RequestMiddleware"]

_LOGGER = logging.getLogger("baton.http")
_FIT_ID = re.compile(rb"[\x21-\x7e]{1,100}")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""Where OpenAI's and Anthropic's clients read the id."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", STATUS_PATH})
_OPEN_PATHS = _QUIET_PATHS | ASSET_PATHS
"""Paths without a client. `/metrics` and `/status` ask for a credential of their own."""
_MAX_BODIES = 16
"""How many bodies of the largest size may arrive, or wait to be parsed, at once."""
_MAX_BODIES_OF_TENANT = 4
"""The most of one client, if there are several."""
_LARGE_BODY_BYTES = 64 * 1024
_CLOSE = {"Connection": "close"}
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class RequestMiddleware:
    """Wraps the application; the module's docstring lists what it does.

    Args:
        app: the application.
        tenants: the clients.
        max_request_bytes: the most bytes of a body.
        body_timeout_s: how long a body may take.
        error_body_of: the shape of errors by path.
        count_call: called with the status of each answer.
        running_ids: the ids of running requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tenants: Tenants,
        max_request_bytes: int,
        body_timeout_s: float,
        error_body_of: Callable[[str], ErrorBody],
        count_call: CountCall,
        running_ids: RunningIds,
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._max_request_bytes = max_request_bytes
        self._body_timeout_s = body_timeout_s
        self._error_body_of = error_body_of
        self._count_call = count_call
        self._running_ids = running_ids
        self._arriving_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, send)
        with serving(call.info):
            try:
                problem = await self._problem_of_serving(scope, receive, call)
                if problem is not None and not call.status:
                    answer = error_response(problem, self._error_body_of(scope["path"]))
                    await answer(scope, receive, call.send)
            finally:
                call.log()
                if scope["path"] not in _QUIET_PATHS:
                    self._count_call(str(call.status or 499))

    async def _problem_of_serving(
        self, scope: Scope, receive: Receive, call: "_Call"
    ) -> Problem | None:
        """Serves one request; returns why it failed, unless the application has answered."""
        try:
            if scope["path"] in _OPEN_PATHS:
                await self._app(scope, receive, call.send)  # which does not read a body
                return None
            return await self._serve_client(scope, receive, call)
        except asyncio.CancelledError:  # the server stops, and this task with it
            return _closing(503, "the server is stopping; try again")
        except Exception as error:
            problem = problem_of(error, call.request_id)
            if call.is_body_read or not _has_large_body(scope):
                return problem
            return replace(problem, headers={**problem.headers, **_CLOSE})

    async def _serve_client(self, scope: Scope, receive: Receive, call: "_Call") -> Problem | None:
        """Serves a request of a client, if its credential and its limits allow it.

        Raises:
            UnauthenticatedError: it has no valid credential.
            ResourceExhaustedError: a limit of the client is reached.
            InvalidArgumentError: a header with an objective is bad.
        """
        tenant = self._tenants.find(_credentials_of(scope))
        with tenant.running():
            call.info.caller = tenant
            call.info.slo = Slo.from_headers(scope["headers"])
            if not self._running_ids.begin(tenant.name, call.request_id):
                call.lengthen_id()
                return await self._serve(scope, receive, call, tenant.name)
            noted_id = call.request_id
            try:
                return await self._serve(scope, receive, call, tenant.name)
            finally:
                self._running_ids.end(tenant.name, noted_id)

    async def _serve(
        self, scope: Scope, receive: Receive, call: "_Call", client: str
    ) -> Problem | None:
        """Runs the application; returns why it cannot."""
        if scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, call.send)
            return None
        problem = self._problem_of_head(scope)
        if problem is not None:
            return problem
        with _CountedBytes(self._arriving_bytes, client) as counted:
            body = await self._body(receive, counted)
            if isinstance(body, Problem):
                return body
            call.is_body_read = True
            kind = dict(scope["headers"]).get(b"content-type", b"")
            is_file = scope["path"] == FILES_PATH and is_form(kind.decode("latin-1"))
            if body and not is_file and not _is_json(kind):
                return http_problem(415, "the body must have the content type application/json")
            scope["state"]["release_body"] = counted.release
            receive = _replaying(body, receive)
            del body  # the endpoint drops it once it is parsed
            await self._app(scope, receive, call.send)
            return None

    def _problem_of_head(self, scope: Scope) -> Problem | None:
        """Why the body need not be read; None if it must be."""
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", b"0")) > self._max_request_bytes:
            return self._too_large()
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            shown = ascii(coding[:64].decode("latin-1"))
            return _closing(415, f"Content-Encoding is {shown}; the body must not be compressed")
        return None

    async def _body(self, receive: Receive, counted: "_CountedBytes") -> bytes | Problem:
        """The body, or why it is not read to its end."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await self._read(receive, counted)
        except TimeoutError:
            return _closing(408, f"the body did not arrive within {self._body_timeout_s:g} s")

    async def _read(self, receive: Receive, counted: "_CountedBytes") -> bytes | Problem:
        """The body, or why it is not read to its end. It ends early if the client leaves."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            part = message.get("body", b"")
            more = message.get("more_body", False)
            body += part
            counted.add(len(part))
            if len(body) > self._max_request_bytes:
                return self._too_large()
            if (problem := self._problem_of_sizes(counted.client)) is not None:
                return problem
        return bytes(body)

    def _problem_of_sizes(self, client: str) -> Problem | None:
        """Why a body is not read on: those that arrive are too large together, the client's or
        all.
        """
        own = self._arriving_bytes[client] if client else 0
        largest = self._max_request_bytes
        if own > _MAX_BODIES_OF_TENANT * largest:
            return _too_many_bodies("of this client ", Reason.CLIENT_CONCURRENCY)
        if self._arriving_bytes.total() > _MAX_BODIES * largest:
            return _too_many_bodies("", Reason.ROUTER_FULL)
        return None

    def _too_large(self) -> Problem:
        return _closing(413, f"the body has more than {self._max_request_bytes} bytes")


def _closing(status: int, message: str) -> Problem:
    """A problem after which the connection cannot be used: the body was not read to its end."""
    headers = _CLOSE | ({"Retry-After": "1"} if status == 503 else {})
    return http_problem(status, message, headers)


def _too_many_bodies(whose: str, reason: Reason) -> Problem:
    message = f"too many large bodies {whose}arrive at once; try again"
    problem = problem_of(ResourceExhaustedError(message, reason=reason), "")
    return replace(problem, headers={**problem.headers, **_CLOSE})


def _has_large_body(scope: Scope) -> bool:
    """Whether the body may be so large that a closed connection costs less than to receive it."""
    if scope["method"] not in _WITH_BODY:
        return False
    declared = dict(scope["headers"]).get(b"content-length")
    return declared is None or int(declared) > _LARGE_BODY_BYTES


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    is_derived = kind.startswith(b"application/") and kind.endswith(b"+json")
    return kind == b"application/json" or is_derived


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body, which it does not keep, then what the server
    gives.
    """
    bodies = [body]

    async def replay() -> Message:
        if not bodies:
            return await receive()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    return replay


class _CountedBytes:
    """The bytes of a body, which count for its client until they are parsed.

    Args:
        counts: the bytes by client.
        client: the client's name.
    """

    def __init__(self, counts: Counter[str], client: str) -> None:
        self.client = client
        self._counts = counts
        self._num_bytes = 0

    def __enter__(self) -> "_CountedBytes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def add(self, num_bytes: int) -> None:
        """Counts further bytes."""
        self._num_bytes += num_bytes
        self._counts[self.client] += num_bytes

    def release(self) -> None:
        """Ends the count. Idempotent."""
        self._counts[self.client] -= self._num_bytes
        self._num_bytes = 0
        if not self._counts[self.client]:
            del self._counts[self.client]


class _Call:
    """One request, for its id and its log line.

    Args:
        scope: the request's.
        send: the server's.

    Attributes:
        request_id: the client's or a new one; also in the scope's state.
        info: what log lines and the pipeline need of it.
        status: of the answer, once it has begun.
        is_body_read: whether the body has been read to its end.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.status = 0
        self.is_body_read = False
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self._echoed_id = given if _FIT_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.info = CallInfo(trace=_trace_of(scope), session=_session_of(scope))
        self._set_id(self._echoed_id.decode())

    def lengthen_id(self) -> None:
        """Makes the id differ from that of another running request of the same client: the
        pipeline needs ids that differ.
        """
        self._set_id(f"{self.request_id}-{uuid.uuid4().hex[:12]}")

    def _set_id(self, request_id: str) -> None:
        self.request_id = self.info.request_id = request_id
        state: dict[str, Any] = self._scope.setdefault("state", {})
        state["request_id"] = request_id

    async def send(self, message: Message) -> None:
        """Adds the id to the headers of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [(name, self._echoed_id) for name in _ID_HEADERS]
            message["headers"] = [*message.get("headers", ()), *ids]
        await self._send(message)

    def log(self) -> None:
        """Writes the log line."""
        method, path = self._scope["method"], self._scope["path"][:200]
        level = logging.DEBUG if path in _QUIET_PATHS else logging.INFO
        if not _LOGGER.isEnabledFor(level):
            return
        duration_ms = round((time.monotonic() - self.info.started_at) * 1000, 1)
        client, status = (self._scope.get("client") or ("",))[0], self.status
        _LOGGER.log(
            level,
            "call method=%s path=%s status=%d duration_ms=%.1f client=%s request_id=%s",
            *(method, ascii(path), status, duration_ms, client, ascii(self.request_id)),
            extra=log_fields(
                method=method, path=path, status=status, duration_ms=duration_ms, client=client
            ),
        )


def _credentials_of(scope: Scope) -> Sequence[str]:
    """The credentials in the headers."""
    given: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key"):
            given.setdefault(name, value.decode("latin-1"))
    return credentials_of(given.get(b"authorization"), given.get(b"x-api-key"))


def _session_of(scope: Scope) -> str:
    """The session that the headers name."""
    headers = [(name, value) for name, value in scope["headers"] if name.startswith(b"x-")]
    return session_from((name.decode("latin-1"), value) for name, value in headers)


def _trace_of(scope: Scope) -> TraceContext | None:
    """The caller's span, from the headers. Two headers are as bad as one that is not valid."""
    values = [value for name, value in scope["headers"] if name == b"traceparent"]
    return parse_traceparent(values[0].decode("latin-1")) if len(values) == 1 else None
