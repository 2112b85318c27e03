"""Envoy's messages about one HTTP request, as tests send them to an endpoint picker."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.v1 import endpoint_picker_pb2 as pb

__all__ = [
    "CHAT",
    "DESTINATION",
    "body_message",
    "destination_of",
    "headers_message",
    "passed_body",
    "status_of",
]

CHAT = "/v1/chat/completions"
DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = "x-gateway-destination-endpoint-subset"


def headers_message(
    path: str = CHAT,
    *,
    method: str = "POST",
    mode: int | None = pb.EXT_PROC_BODY_MODE_FULL_DUPLEX_STREAMED,
    response_mode: int = pb.EXT_PROC_BODY_MODE_UNSPECIFIED,
    has_body: bool = True,
    subset: Sequence[str] | str | None = None,
    headers: Mapping[str, str] | None = None,
) -> pb.ExtProcRequest:
    """Returns the first message about a request; without a mode it says nothing of bodies."""
    message = pb.ExtProcRequest()
    part = message.request_headers
    part.end_of_stream = not has_body
    for name, value in {":method": method, ":path": path, **(headers or {})}.items():
        part.headers.headers.add(key=name, raw_value=value.encode())
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = response_mode
    if subset is not None:
        hint: Any = subset if isinstance(subset, str) else list(subset)
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({_SUBSET: hint})
    return message


def body_message(body: bytes, *, is_end: bool = True) -> pb.ExtProcRequest:
    part = pb.ExtProcBody(body=body, end_of_stream=is_end)
    return pb.ExtProcRequest(request_body=part)


def destination_of(answers: Sequence[pb.ExtProcResponse]) -> str | None:
    """Returns the server that answers name, in the header and in the metadata; None without one."""
    named = []
    for answer in answers:
        kind = answer.WhichOneof("answer")
        if kind not in ("request_headers", "request_body"):
            continue
        for option in getattr(answer, kind).response.header_mutation.set_headers:
            assert option.header.key == DESTINATION
            named.append(option.header.raw_value.decode())
            assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == named[-1]
    assert len(named) <= 1
    return named[0] if named else None


def passed_body(answers: Sequence[pb.ExtProcResponse]) -> tuple[bytes, bool]:
    """Returns the request's body as it goes on, and whether its end does."""
    pieces = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in answers
        if answer.WhichOneof("answer") == "request_body"
    ]
    assert all(len(piece.body) < 64 * 1024 for piece in pieces)
    assert not any(piece.end_of_stream for piece in pieces[:-1])
    is_ended = bool(pieces) and pieces[-1].end_of_stream
    return b"".join(piece.body for piece in pieces), is_ended


def status_of(answers: Sequence[pb.ExtProcResponse]) -> int:
    """Returns the status of the answer that ends the request."""
    (answer,) = answers
    return int(answer.immediate_response.status.code)
