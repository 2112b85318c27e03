"""`LocalCalls`: calls of the API in this process, for clients who wait for no answer."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message

from router.batches.runner import Answer
from router.http.errors import error_response, openai_error, problem_of
from router.tenants.tenants import Tenants
from rpc.logs import CallInfo, serving

__all__ = ["LocalCalls"]

_BUSY = (429, 503)
_ID_IN_USE = 409
"""Of clients' bodies, or of a call of this batch that a lost process has not ended yet."""


class LocalCalls:
    """Calls an application as the HTTP server does. Of a client's limits that of its tokens holds;
    those of its calls would refuse what it asks meanwhile.

    Args:
        app: the endpoints, without the middleware that reads bodies and finds clients.
        tenants: the clients.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(
        self, tenant: str, path: str, body: bytes, request_id: str, timeout_s: float
    ) -> Answer:
        """Returns the answer; errors are answers, too.

        Args:
            tenant: the client's name.
            path: the endpoint.
            body: JSON.
            request_id: names the request.
            timeout_s: seconds until its deadline.
        """
        exchange = _Exchange(body)
        scope = _scope(self._app, path, request_id)
        try:
            caller = self._tenants.named(tenant)
            caller.check_tokens()
            call = CallInfo(request_id, caller=caller, is_counted=False, timeout_s=timeout_s)
            with serving(call):
                await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            exchange = _Exchange(body)
            response = error_response(problem_of(error, request_id), openai_error)
            await response(scope, exchange.receive, exchange.send)
        return exchange.answer()


class _Exchange:
    """A request and its answer.

    Args:
        body: the request's.
    """

    def __init__(self, body: bytes) -> None:
        self._bodies = [body]
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """Gives the body; then waits, as a client who does not leave."""
        if not self._bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}

    async def send(self, message: Message) -> None:
        """Takes a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = dict(message.get("headers", ()))
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> Answer:
        """The answer."""
        retries = self._headers.get(b"x-should-retry") != b"false"
        after = self._headers.get(b"retry-after")
        return Answer(
            self._status,
            b"".join(self._parts) or b"null",
            is_busy=self._status == _ID_IN_USE or (self._status in _BUSY and retries),
            retry_after_s=None if after is None else float(after),
        )


def _scope(app: ASGIApp, path: str, request_id: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "state": {"request_id": request_id},
    }
