"""Calls of an ASGI application without sockets."""

import asyncio
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from tests.support.odd_requests import OddRequest


@dataclass
class Answer:
    """What the application answered.

    Attributes:
        is_complete: whether the last part of the body was sent.
    """

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    @property
    def content_type(self) -> str:
        return self.headers.get(b"content-type", b"").decode().partition(";")[0]


async def call_app(app: Any, request: OddRequest) -> Answer:
    """Sends a request; returns the answer, which is cut if the client leaves."""
    answer = Answer()
    left = asyncio.Event()
    messages = [{"type": "http.request", "body": request.body, "more_body": False}]
    num_parts = 0
    if request.leaves_after == 0:
        left.set()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_parts
        if message["type"] == "http.response.start":
            assert not answer.status
            answer.status = message["status"]
            answer.headers = dict(message["headers"])
            return
        assert answer.status
        answer.body += message.get("body", b"")
        answer.is_complete = not message.get("more_body", False)
        num_parts += 1
        if num_parts == request.leaves_after:
            left.set()

    await app(_scope(request), receive, send)
    return answer


def _scope(request: OddRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": urllib.parse.unquote(request.path),
        "raw_path": urllib.parse.quote(request.path).encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(request.headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
