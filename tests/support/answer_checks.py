"""Checks of the HTTP server's answers, whatever was asked."""

import json
from typing import Any

from tests.support.asgi_calls import Answer
from tests.support.odd_requests import OddRequest

_OK = frozenset({200, 400, 404, 405, 413, 415, 499})


def check_answer(request: OddRequest, answer: Answer) -> None:
    """Raises AssertionError if an answer of a healthy server is not as documented."""
    if request.path == "/v1/embeddings" and answer.status == 501:
        pass
    elif request.leaves_after is None or answer.status:
        assert answer.status in _OK, answer.status
    if not answer.status:
        return
    assert answer.headers[b"x-request-id"]
    if answer.status == 200 and answer.content_type == "text/event-stream":
        _check_stream(request, answer)
    else:
        assert answer.content_type == "application/json", answer.content_type
        value = strict_json(answer.body)
        if answer.status != 200:
            check_error(request.path, value)


def check_error(path: str, body: Any) -> None:
    """Checks the shape of an error."""
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}, body
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) < 20_000


def _check_stream(request: OddRequest, answer: Answer) -> None:
    if request.leaves_after is not None:
        return
    assert answer.is_complete
    events = [event for event in answer.body.decode().split("\n\n") if event]
    texts = [line[6:] for event in events for line in event.split("\n") if line[:6] == "data: "]
    ends_with_done = texts[-1] == "[DONE]"
    values = [strict_json(text.encode()) for text in texts[: -1 if ends_with_done else None]]
    if not ends_with_done:
        assert values[-1]["type"] in (
            "message_stop",
            "error",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ), values[-1]
    # All scripted requests can be served, so an error in a stream is a bug.
    assert not any("error" in value and value["error"] for value in values), values


def strict_json(text: bytes) -> Any:
    """The value of a JSON text; NaN and Infinity are errors."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in an answer")

    return json.loads(text.decode(), parse_constant=refuse)
