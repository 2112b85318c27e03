"""JSON without whitespace, as texts, bytes, responses and server-sent events.

`text_json` is fast for texts: a stream encodes one for each event.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

__all__ = ["event", "json_bytes", "json_response", "text_json"]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
text_json: Callable[[Any], str] = _ENCODER.encode
"""The JSON text of a value."""


def json_bytes(value: Any) -> bytes:
    """The JSON text of a value in UTF-8."""
    return text_json(value).encode(errors="replace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response whose body is the JSON text of a value."""
    return Response(json_bytes(value), status, headers=headers, media_type="application/json")


def event(value: Any) -> bytes:
    """A server-sent event whose data is the JSON text of a value."""
    return b"data: %b\n\n" % json_bytes(value)
